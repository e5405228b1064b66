"""Four bits per value, in two stages, with error feedback for both."""

from __future__ import annotations

from lab.codec.levels import Int4 as Codec
from lab.exchange.coded import TwoStage
from lab.exchange.memory import Memory


class Int4(TwoStage):
    """Two-stage averaging as Int8's, in half the bits, with error feedback (Seide et al. 2014).

    Sixteen levels are few, so the rounding errors of both stages are carried over. A rank sends
    (N-1)/N bytes per value, plus 8 per block at each stage.

    Args:
        block_size: values that share a smallest and a largest one; they may belong to several
            parameters.
        error_feedback: False drops the rounding errors, to show what that costs.

    Raises:
        ValueError: `block_size` is not a positive multiple of 8, or `error_feedback` is not a bool.
    """

    def __init__(self, block_size: int = 128, error_feedback: bool = True) -> None:
        super().__init__(Codec(block_size), Memory(error_feedback))
        self.block_size = block_size
