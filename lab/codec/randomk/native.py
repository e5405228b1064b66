"""The codec of random-k in C++, for CPU tensors: the signatures of kernels.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from lab.codec.native import bind, loader


class Kernels:
    """The functions of one compiled library; lab.codec.randomk.codec describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._encode = bind(library.randomk_encode, tensors=4, numbers=3)
        self._decode = bind(library.randomk_decode, tensors=2, numbers=3)

    def encode(
        self, gradient: Tensor, residual: Tensor | None, values: Tensor, probe: Tensor, seed: int
    ) -> None:
        self._encode(gradient, residual, values, probe, len(gradient), len(values), seed)

    def decode(self, values: Tensor, out: Tensor, seed: int) -> None:
        self._decode(values, out, len(out), len(values), seed)


kernels = loader(Path(__file__), Kernels)
