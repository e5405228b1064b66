"""The codecs: how each writes a row of values in few bits, in plain torch.

A class has C++ kernels of its name (cpp/NAME.cpp); GPUs' are told by its `reading`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.codec.base import Codec, Shapes
from lab.codec.kernels import Reading
from lab.codec.layout import MessageLayout, RowBytes, Rows, spans
from lab.settings import checks

SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SMALLEST_STEP = torch.finfo(torch.float32).tiny  # a block of equal values has one too
THRESHOLDS = ("zero", "mean")
GRANULARITIES = ("column", "block")
BLOCK_SIZE = 1024  # of 1-bit SGD, unless set
INDEX_BYTES = VALUE_BYTES = 4
LINE_BYTES = 64  # of a cache, which a value alone moves in each direction


class Cast(Codec):
    """Each value as bfloat16 or float16. Messages can be added: libraries round each sum.

    Args:
        dtype: one of SHORT.
    """

    name = "cast"

    def __init__(self, dtype: str) -> None:
        self.dtype = SHORT[checks.one_of("exchange.dtype", dtype, SHORT)]
        self.reading = Reading(dtype, 1, 2)

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(0, 2 * columns)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        payload.view(self.dtype).copy_(values)

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        return payload.view(self.dtype).float()


class Float8(Codec):
    """Each value as float8_e4m3fn, scaled by the largest magnitude of its block.

    (Micikevicius et al., FP8 Formats for Deep Learning, 2022: four bits of exponent, three of
    mantissa, up to 448.) Blocks run across parameters.

    Args:
        block_size: values that share a scale, at least 8.
    """

    name = "float8"

    def __init__(self, block_size: int = 128) -> None:
        self.block_size = checks.integer("exchange.block_size", block_size, 8)
        unit = 1 if block_size % 4 else 4
        self.reading = Reading("float8", unit, unit, block=block_size)

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(4, columns)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        largest = values.abs().amax(dim=1, keepdim=True)
        scale = (largest / torch.finfo(torch.float8_e4m3fn).max).clamp_(SMALLEST_STEP)
        header.view(torch.float32).copy_(scale)
        payload.view(torch.float8_e4m3fn).copy_(values / scale)

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        return payload.view(torch.float8_e4m3fn).float().mul_(header.view(torch.float32))


class Levels(Codec):
    """Values rounded to the nearest of `num_levels` equidistant levels, halves upwards, by blocks.

    The header is a block's smallest value and the step between two levels. A finite value is off by
    at most half a step, and a block of equal values is exact. Blocks run across parameters.

    Args:
        block_size: values of a block, a positive multiple of `multiple`.
    """

    num_levels: ClassVar[int]
    per_byte: ClassVar[int]
    multiple: ClassVar[int]

    def __init__(self, block_size: int) -> None:
        least = self.multiple
        if not checks.is_whole(block_size) or block_size < least or block_size % least:
            raise ValueError(
                f"exchange.block_size={block_size}: must be a multiple of {least} above 0"
            )
        self.block_size = block_size
        self.reading = Reading("levels", 4 * self.per_byte, 4, self.num_levels, block_size)

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(8, -(-columns // self.per_byte))

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        ends = header.view(torch.float32)
        low, step = ends[:, :1], ends[:, 1:]
        low.copy_(values.amin(dim=1, keepdim=True))
        spread = values.amax(dim=1, keepdim=True) - low
        step.copy_(spread.div_(self.num_levels - 1).clamp_(SMALLEST_STEP))
        # Conversion to a byte truncates; with the half added it rounds.
        levels = (values - low).div_(step).add_(0.5).to(torch.uint8)
        payload.copy_(levels[:, :: self.per_byte])
        if self.per_byte == 2:
            odd = levels[:, 1::2]
            payload[:, : odd.shape[1]] |= odd << 4

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        ends, levels = header.view(torch.float32), payload
        if self.per_byte == 2:
            levels = torch.stack([payload & 15, payload >> 4], dim=2).flatten(1)
        return levels[:, :columns].float().mul_(ends[:, 1:]).add_(ends[:, :1])


class Int8(Levels):
    """A byte for each value (ByteGrad of Bagua: Gan et al., VLDB 2022, as MinMaxUInt8)."""

    name = "int8"
    per_byte, num_levels, multiple = 1, 256, 4


class Int4(Levels):
    """Half a byte for each value, the first of two in the lower half."""

    name = "int4"
    per_byte, num_levels, multiple = 2, 16, 8


class OneBit(Codec):
    """The quantiser of 1-bit SGD (Seide et al., Interspeech 2014, section 3), as CNTK has it.

    `threshold="zero"` splits a row at 0 and reads each side as its mean; `"mean"` splits it at its
    mean m and reads m - d and m + d, with d the mean absolute deviation (ColumnQuantizer.h).

    Args:
        threshold: one of THRESHOLDS.
        granularity: the values that share two reconstruction values. "column": all weights into
            one output unit, a row of the [out, in*height*width] view, CNTK's column. "block":
            `block_size` values.
        block_size: values per block, at least 8; the remainder of a parameter travels exactly.
        min_columns: with "column", parameters with shorter columns (biases, small kernels) travel
            exactly: their scales would outweigh the savings of bits.
    """

    name = "onebit"

    def __init__(
        self,
        threshold: str = "zero",
        granularity: str = "column",
        block_size: int = BLOCK_SIZE,
        min_columns: int = 64,
    ) -> None:
        self.threshold = checks.one_of("exchange.threshold", threshold, THRESHOLDS)
        self.granularity = checks.one_of("exchange.granularity", granularity, GRANULARITIES)
        self.block_size = checks.integer("exchange.block_size", block_size, 8)
        self.min_columns = checks.integer("exchange.min_columns", min_columns, 1)
        if granularity == "column" and block_size != BLOCK_SIZE:
            raise ValueError(f"exchange.block_size={block_size}: needs granularity=block")
        self.option = int(threshold == "mean")
        self.reading = Reading("mean" if self.option else "sides", 8)

    def rows(self, shapes: Shapes) -> Iterator[Rows]:
        for name, start, stop in spans(shapes):
            shape, size = shapes[name], stop - start
            if self.granularity == "block":
                if whole := size // self.block_size * self.block_size:
                    yield Rows(start, start + whole, self.block_size)
            elif len(shape) > 1 and size and size // shape[0] >= self.min_columns:
                yield Rows(start, stop, size // shape[0])

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(8, (columns + 7) // 8)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        scales = header.view(torch.float32)
        if self.option:
            mean = values.mean(dim=1, keepdim=True, dtype=torch.float64).float()
            upper = values >= mean
            distance = (values - mean).abs_().mean(dim=1, keepdim=True, dtype=torch.float64).float()
            torch.cat([mean - distance, mean + distance], dim=1, out=scales)
        else:
            upper = values >= 0
            for column, side in enumerate((~upper, upper)):
                total = torch.where(side, values, 0).sum(dim=1, dtype=torch.float64)
                # An empty side has the sum 0; dividing it by 1 makes its mean 0.
                scales[:, column] = total / side.sum(dim=1).clamp(min=1)
        payload.copy_(_packed(upper))

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        scales = header.view(torch.float32)
        return torch.where(_unpacked(payload, columns), scales[:, 1:], scales[:, :1])


class Signs(Codec):
    """Signs and the mean magnitude of a parameter (Karimireddy et al. 2019, Algorithm 1).

    Args:
        min_values: smaller parameters travel exactly.
    """

    name = "signs"
    reading = Reading("signs", 8)

    def __init__(self, min_values: int = 4096) -> None:
        self.min_values = checks.integer("exchange.min_values", min_values, 1)

    def rows(self, shapes: Shapes) -> Iterator[Rows]:
        for _, start, stop in spans(shapes):
            if stop - start >= self.min_values:
                yield Rows(start, stop, stop - start)

    def also_moved(self, layout: MessageLayout) -> float:
        """Count a second pass over gradient and residual: the magnitude must be known first."""
        return 8.0 * layout.num_values

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(4, (columns + 7) // 8)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        magnitude = values.abs().mean(dim=1, keepdim=True, dtype=torch.float64)
        header.view(torch.float32).copy_(magnitude)
        payload.copy_(_packed(torch.signbit(values)))

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        magnitude = header.view(torch.float32)
        return torch.where(_unpacked(payload, columns), -magnitude, magnitude)


class TopK(Codec):
    """A share of the values of each parameter, those of largest magnitude; others are read as 0.

    NaN is the largest of all. Of equal magnitudes, which are taken is not defined.

    Args:
        ratio: the share, above 0 and at most 1; rounded up.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = checks.number("exchange.ratio", ratio, above=0, at_most=1)
        self.reading = Reading("largest", share=self.ratio)
        (self.option,) = struct.unpack("<q", struct.pack("<d", ratio))

    def rows(self, shapes: Shapes) -> Iterator[Rows]:
        for _, start, stop in spans(shapes):
            if start < stop:
                yield Rows(start, stop, stop - start)

    def also_moved(self, layout: MessageLayout) -> float:
        """Count what candidates move: each is read and written several times, a line at a time."""
        sent = layout.num_bytes / (INDEX_BYTES + VALUE_BYTES)
        return (2 * LINE_BYTES + 72) * sent

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(0, (INDEX_BYTES + VALUE_BYTES) * math.ceil(self.ratio * columns))

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        indices, kept = payload.view(torch.int32).tensor_split(2, dim=1)
        chosen = values.abs().topk(indices.shape[1], sorted=False).indices.sort().values
        indices.copy_(chosen)
        kept.view(torch.float32).copy_(values.gather(1, chosen))

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        indices, kept = payload.view(torch.int32).tensor_split(2, dim=1)
        values = kept.view(torch.float32)
        return values.new_zeros(len(values), columns).scatter_(1, indices.long(), values)


def _packed(flags: Tensor) -> Tensor:
    """Pack bool [rows, columns] into uint8 [rows, ceil(columns / 8)]."""
    octets = F.pad(flags.view(torch.uint8), (0, -flags.shape[1] % 8)).unflatten(1, (-1, 8))
    return (octets << _shifts(flags)).sum(dim=2, dtype=torch.uint8)


def _unpacked(octets: Tensor, columns: int) -> Tensor:
    """Return the flags of `_packed`, bool [rows, columns]."""
    return (octets.unsqueeze(2) >> _shifts(octets) & 1).bool().flatten(1)[:, :columns]


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
