"""ByteGrad: eight bits per value, in two stages."""

from __future__ import annotations

from lab.codec.levels import Int8 as Codec
from lab.exchange.coded import TwoStage
from lab.exchange.memory import Memory


class Int8(TwoStage):
    """Two-stage 8-bit averaging (ByteGrad of Bagua: Gan et al., VLDB 2022).

    A rank sends 2(N-1)/N bytes per value, plus 8 per block at each stage. There is no error
    feedback, as ByteGrad has none: a delivered value is off by at most half a level of its block in
    the mean, plus the mean of half a level in each rank's gradient.

    Args:
        block_size: values that share a smallest and a largest one; they may belong to several
            parameters.

    Raises:
        ValueError: `block_size` is not a positive multiple of 4.
    """

    def __init__(self, block_size: int = 1024) -> None:
        super().__init__(Codec(block_size), Memory(keeps=False))
        self.block_size = block_size

    def error_bound(self, largest: float, size: int) -> float:
        half = largest / (Codec.num_levels - 1)  # of a level, where values fill [-largest, largest]
        return half + half * (1 + 1 / (Codec.num_levels - 1))
