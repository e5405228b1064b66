"""Values in fewer bits of floating point: bfloat16 and float16, and eight bits by blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.kernels import Reading
from lab.codec.layout import RowBytes
from lab.settings import checks

SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Cast(Codec):
    """Each value as bfloat16 or float16. Messages can be added: libraries round each sum.

    Args:
        dtype: one of SHORT.
    """

    name = "cast"

    def __init__(self, dtype: str) -> None:
        self.dtype = SHORT[checks.one_of("exchange.dtype", dtype, SHORT)]

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(0, 2 * columns)

    @property
    def reading(self) -> Reading:
        return Reading(str(self.dtype).removeprefix("torch."), 1)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        payload.view(self.dtype).copy_(values)

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        return payload.view(self.dtype).float()


class Float8(Codec):
    """Each value as float8_e4m3fn, scaled by the largest magnitude of its block.

    (Micikevicius et al., FP8 Formats for Deep Learning, 2022: four bits of exponent, three of
    mantissa, up to 448.) Blocks run across parameters.

    Args:
        block_size: values that share a scale.

    Raises:
        ValueError: `block_size` is no integer of at least 8.
    """

    name = "float8"

    def __init__(self, block_size: int = 128) -> None:
        self.block_size = checks.whole("exchange.block_size", block_size, 8)

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(4, columns)

    @property
    def reading(self) -> Reading:
        return Reading("float8", 1)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        about = torch.finfo(torch.float8_e4m3fn)
        largest = values.abs().amax(dim=1, keepdim=True)
        scale = (largest / about.max).clamp_(torch.finfo(torch.float32).tiny)
        header.view(torch.float32).copy_(scale)
        payload.view(torch.float8_e4m3fn).copy_(values / scale)

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        return payload.view(torch.float8_e4m3fn).float().mul_(header.view(torch.float32))
