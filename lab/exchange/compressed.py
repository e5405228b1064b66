"""Compressed exchanges: a codec over a path, and what it leaves out kept or dropped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lab.codec import levels, onebit, topk
from lab.codec.signs import Signs
from lab.exchange.base import Exchange, Shapes
from lab.exchange.coded import AllGather, TwoStage
from lab.exchange.memory import Memory
from lab.settings import checks

NOTABLE = 0.1  # share of all values: sent as float32, they are most of what one bit each leaves


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
        codec = onebit.OneBit(threshold, granularity, block_size, min_columns)
        super().__init__(codec, Memory(error_feedback))
        checks.whole("exchange.warmup_steps", warmup_steps, 0)
        self.warmup_steps = warmup_steps

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        num_values = sum(map(math.prod, shapes.values()))
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            which = f"all of a run of {self.total_steps} steps, with {key}.warmup_steps="
            yield num_values, f"{which}{self.warmup_steps}"
            return
        coded = sum(rows.stop - rows.start for rows in self.codec.rows(shapes))
        yield num_values - coded, self.codec.left_out(key)


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
        super().__init__(levels.Int8(block_size), Memory(keeps=False))
        self.block_size = block_size

    def error_bound(self, largest: float, size: int) -> float:
        steps = levels.Int8.num_levels - 1
        half = largest / steps  # of a level, where values fill [-largest, largest]
        return half + half * (1 + 1 / steps)


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
        super().__init__(levels.Int4(block_size), Memory(error_feedback))
        self.block_size = block_size


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


class TopK(AllGather):
    """The k values of largest magnitude, with error feedback (Stich et al. 2018, Algorithm 1).

    This is Deep Gradient Compression (Lin et al. 2018) without momentum correction and warm-up.
    Ranks choose different values, so every rank receives all of them: it sends 8k(N-1) bytes, an
    int32 index and a float32 value each, and adds in rank order.

    Args:
        ratio: k is this share of the values of each parameter, rounded up.
        error_feedback: see Memory.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        super().__init__(topk.TopK(ratio), Memory(error_feedback))
        self.ratio = ratio


def left_exact(exchange: Exchange, shapes: Shapes) -> list[str]:
    """Say which values an exchange's codecs leave as they are, a line each, where they are many.

    Args:
        shapes: of the parameters that are exchanged, by name.
    """
    total = sum(map(math.prod, shapes.values()))
    return [
        f"{100 * number / total:.0f} % of the values travel as float32 ({number:,} of {total:,}): "
        f"{which}"
        for number, which in exchange.left_exact(shapes)
        if number >= NOTABLE * max(1, total)
    ]
