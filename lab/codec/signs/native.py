"""The sign codec in C++, for CPU tensors: the signatures of kernels.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from lab.codec.native import bind, loader


class Kernels:
    """The functions of one compiled library; lab.codec.signs.codec describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._encode = bind(library.signs_encode, tensors=4, numbers=1)
        self._decode = bind(library.signs_decode, tensors=3, numbers=3)

    def encode(
        self, gradient: Tensor, residual: Tensor | None, magnitude: Tensor, bits: Tensor
    ) -> None:
        self._encode(gradient, residual, magnitude, bits, len(gradient))

    def decode(self, magnitudes: Tensor, bits: Tensor, out: Tensor) -> None:
        self._decode(magnitudes, bits, out, len(bits), bits.stride(0), len(out))


kernels = loader(Path(__file__), Kernels)
