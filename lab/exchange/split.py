"""Which parameters are compressed: the rules, of shapes and settings alone, without torch.

Exchanges and their cost cards ask the same rules, so that predicted bytes are those that travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Matrix = tuple[int, int]  # rows and columns


def quantised(
    shape: Sequence[int], granularity: str, block_size: int, min_columns: int
) -> Matrix | None:
    """The rows that 1-bit SGD quantises, each with scales of its own; None: all travels exactly.

    With granularity "block" the values after the last whole block travel exactly.

    Args:
        shape, granularity, block_size, min_columns: see lab.exchange.onebit.OneBit.
    """
    if granularity == "block":
        rows = math.prod(shape) // block_size
        return (rows, block_size) if rows else None
    matrix = as_matrix(shape)
    return matrix if matrix and matrix[1] >= min_columns else None


def low_rank(shape: Sequence[int], rank: int) -> Matrix | None:
    """The matrix that PowerSGD approximates by two factors of `rank`; None: they save nothing."""
    matrix = as_matrix(shape)
    return matrix if matrix and rank * sum(matrix) < math.prod(matrix) else None


def signed(shape: Sequence[int], min_values: int) -> bool:
    """Whether EF-SignSGD sends signs of the parameter; smaller ones travel exactly."""
    return math.prod(shape) >= min_values


def num_sent(shape: Sequence[int], ratio: float) -> int:
    """The values of a parameter that a sparsifying exchange sends."""
    return math.ceil(ratio * math.prod(shape))


def as_matrix(shape: Sequence[int]) -> Matrix | None:
    """[outputs, the rest]; None for vectors, and where there are no values."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    return shape[0], math.prod(shape[1:])
