"""The sign codec in C++, for CPU tensors: the signatures of kernels.cpp."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from torch import Tensor

from lab.codec import build
from lab.codec.native import bind

SOURCE = Path(__file__).with_name("kernels.cpp")


@functools.cache
def kernels(level: str) -> Kernels | None:
    """Return the kernels for processors of `level`; None, after a warning, if not buildable."""
    library = build.load(SOURCE, level)
    return None if library is None else Kernels(library)


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
