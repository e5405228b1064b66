"""The codec of top-k in C++, for CPU tensors: the signatures of kernels.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from lab.codec.native import bind, loader


class Kernels:
    """The functions of one compiled library; lab.codec.topk.codec describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._encode = bind(library.topk_encode, tensors=4, numbers=3)
        self._decode = bind(library.topk_decode, tensors=2, numbers=3)

    def encode(
        self,
        gradient: Tensor,
        residual: Tensor | None,
        indices: Tensor,
        values: Tensor,
        offset: int,
    ) -> None:
        numbers = len(gradient), len(indices), offset
        self._encode(gradient, residual, indices, values, *numbers)

    def decode(self, messages: Tensor, out: Tensor) -> None:
        self._decode(messages, out, len(messages), messages.shape[2], len(out))


kernels = loader(Path(__file__), Kernels)
