"""1-bit SGD: two quantised stages, with error feedback at both."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lab.codec.onebit import OneBit as Codec
from lab.exchange.base import Shapes
from lab.exchange.bucket import GradBucket
from lab.exchange.coded import TwoStage
from lab.exchange.direction import require_integer
from lab.exchange.memory import Memory


class OneBit(TwoStage):
    """Two-stage 1-bit SGD with error feedback (Seide et al. 2014, section 3; CNTK's 1BitSGD).

    A rank sends n/4*(N-1)/N bytes, plus 8 bytes of scales for each row at each stage.

    Args:
        threshold, granularity, block_size, min_columns: see lab.codec.onebit.OneBit.
        warmup_steps: steps in full precision before quantisation starts.
        error_feedback: False drops both quantisation errors, to show what that costs.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        threshold: str = "zero",
        granularity: str = "column",
        block_size: int = 1024,
        min_columns: int = 64,
        warmup_steps: int = 0,
        error_feedback: bool = True,
    ) -> None:
        codec = Codec(threshold, granularity, block_size, min_columns)
        super().__init__(codec, Memory(error_feedback))
        require_integer("warmup_steps", warmup_steps, 0)
        self.warmup_steps = warmup_steps

    def is_coded(self, bucket: GradBucket) -> bool:
        return bucket.step >= self.warmup_steps

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        num_values = sum(map(math.prod, shapes.values()))
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            which = f"all of a run of {self.total_steps} steps, with {key}.warmup_steps="
            yield num_values, f"{which}{self.warmup_steps}"
            return
        coded = sum(rows.stop - rows.start for rows in self.codec.rows(shapes))
        yield num_values - coded, self.codec.left_out(key)
