"""The 1-bit codec in C++, for CPU tensors: the signatures of kernels.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from lab.codec.native import bind, loader


class Kernels:
    """The functions of one compiled library; lab.codec.onebit.codec describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._encode = bind(library.onebit_encode, tensors=4, numbers=6)
        self._decode = bind(library.onebit_decode, tensors=3, numbers=6)
        self._reduce = bind(library.onebit_reduce, tensors=5, numbers=6)

    def encode(
        self,
        gradient: Tensor,
        residual: Tensor | None,
        threshold: str,
        scales: Tensor,
        bits: Tensor,
    ) -> None:
        numbers = *gradient.shape, *_lines(scales, bits), threshold == "mean"
        self._encode(gradient, residual, scales, bits, *numbers)

    def decode(self, scales: Tensor, bits: Tensor, out: Tensor, add: bool) -> None:
        self._decode(scales, bits, out, *out.shape, *_lines(scales, bits), add)

    def reduce(
        self,
        scales: Tensor,
        bits: Tensor,
        total: Tensor,
        residual: Tensor | None,
        threshold: str,
        out_scales: Tensor,
        out_bits: Tensor,
    ) -> None:
        ranks = len(bits), scales.stride(0), bits.stride(0)
        numbers = *ranks, *total.shape, threshold == "mean"
        self._reduce(scales, bits, residual, out_scales, out_bits, *numbers)


def _lines(scales: Tensor, bits: Tensor) -> tuple[int, int, int]:
    """Return rows per line, and the strides of lines in float32 values and in bytes."""
    return scales.shape[1], scales.stride(0), bits.stride(0)


kernels = loader(Path(__file__), Kernels)
