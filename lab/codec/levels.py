"""Equidistant levels between the smallest and the largest value of a block: int8 and int4."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.kernels import Reading
from lab.codec.layout import RowBytes
from lab.settings import checks

SMALLEST_STEP = torch.finfo(torch.float32).tiny  # a block of equal values has one too


class Levels(Codec):
    """Values rounded to the nearest of a number of levels, halves upwards, block by block.

    The header is a block's smallest value and the step between two levels. A finite value is off by
    at most half a step, and a block of equal values is exact. Blocks run across parameters.

    Args:
        block_size: values of a block.

    Raises:
        ValueError: `block_size` is not a positive multiple of `multiple`.
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

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        ends = header.view(torch.float32)
        low, step = ends[:, :1], ends[:, 1:]
        low.copy_(values.amin(dim=1, keepdim=True))
        spread = values.amax(dim=1, keepdim=True) - low
        step.copy_(spread.div_(self.num_levels - 1).clamp_(SMALLEST_STEP))
        # Conversion to a byte truncates; with the half added it rounds.
        self.pack((values - low).div_(step).add_(0.5).to(torch.uint8), payload)

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        ends = header.view(torch.float32)
        return self.unpacked(payload)[:, :columns].float().mul_(ends[:, 1:]).add_(ends[:, :1])

    @property
    def reading(self) -> Reading:
        return Reading("levels", self.per_byte, self.num_levels)

    def pack(self, levels: Tensor, payload: Tensor) -> None:
        """Write levels, uint8 [rows, columns], as they travel."""
        payload.copy_(levels)

    def unpacked(self, payload: Tensor) -> Tensor:
        """Return the levels of a payload, uint8 [rows, at least columns]."""
        return payload


class Int8(Levels):
    """A byte for each value (ByteGrad of Bagua: Gan et al., VLDB 2022, as MinMaxUInt8)."""

    name = "int8"
    per_byte = 1
    num_levels = 256
    multiple = 4

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(8, columns)


class Int4(Levels):
    """Half a byte for each value, the first of two in the lower half."""

    name = "int4"
    per_byte = 2
    num_levels = 16
    multiple = 8

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(8, (columns + 1) // 2)

    def pack(self, levels: Tensor, payload: Tensor) -> None:
        even, odd = levels[:, ::2], levels[:, 1::2]
        payload.copy_(even)
        payload[:, : odd.shape[1]] |= odd << 4

    def unpacked(self, payload: Tensor) -> Tensor:
        return torch.stack([payload & 15, payload >> 4], dim=2).flatten(1)
