"""Rules for which parameters are compressed, from shapes and settings alone, without torch.

Exchanges and their costs use the same rules, so that predicted and sent bytes agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Matrix = tuple[int, int]  # rows and columns


def low_rank(shape: Sequence[int], rank: int) -> Matrix | None:
    """Return the matrix shape that PowerSGD factorises; None: factors of `rank` save nothing."""
    matrix = as_matrix(shape)
    return matrix if matrix and rank * sum(matrix) < math.prod(matrix) else None


def rank_of(rows: int, columns: int, fraction: float) -> int:
    """Return the rank of Dion's factors: a fraction of the shorter side, rounded up."""
    return math.ceil(fraction * min(rows, columns))


def num_sent(shape: Sequence[int], ratio: float) -> int:
    """Return how many values of a parameter a sparsifying exchange sends."""
    return math.ceil(ratio * math.prod(shape))


def as_matrix(shape: Sequence[int]) -> Matrix | None:
    """Return `shape` as [outputs, the rest]; None for vectors and empty tensors."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    return shape[0], math.prod(shape[1:])
