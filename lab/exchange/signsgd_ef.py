"""EF-SignSGD: signs, one magnitude for each tensor, and error feedback."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lab.codec.signs import Signs
from lab.exchange.base import Shapes
from lab.exchange.coded import AllGather
from lab.exchange.memory import Memory


class SignSGD(AllGather):
    """Scaled sign with error feedback (Karimireddy et al. 2019, Algorithm 1), layer by layer.

    With p = gradient + residual of one tensor of d values, a rank sends sign(p) and |p|_1 / d and
    keeps p - |p|_1 / d * sign(p). Every rank receives all bits, adds them in rank order and divides
    by N, so it sends (N-1)(d/8 + 4) bytes for a tensor: cheap for few ranks only.

    Args:
        min_values: smaller tensors travel exactly.
        error_feedback: see Memory.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, min_values: int = 4096, error_feedback: bool = True) -> None:
        super().__init__(Signs(min_values), Memory(error_feedback))
        self.min_values = min_values

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        small = [size for s in shapes.values() if (size := math.prod(s)) < self.min_values]
        yield sum(small), f"tensors of fewer values than {key}.min_values={self.min_values}"
