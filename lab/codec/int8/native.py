"""The 8-bit codec in C++, for CPU tensors: the signatures of kernels.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from lab.codec.int8.reference import HEADER_BYTES
from lab.codec.native import bind, loader


class Kernels:
    """The functions of one compiled library; lab.codec.int8.codec describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._encode = bind(library.int8_encode, tensors=2, numbers=2)
        self._decode = bind(library.int8_decode, tensors=2, numbers=2)
        self._mean = bind(library.int8_mean, tensors=2, numbers=4)

    def encode(self, values: Tensor, records: Tensor) -> None:
        self._encode(values, records, len(values), _block(records))

    def decode(self, records: Tensor, out: Tensor) -> None:
        self._decode(records, out, len(out), _block(records))

    def encode_mean(self, records: Tensor, mean: Tensor, out: Tensor) -> None:
        self._mean(records, out, len(records), records.stride(0), len(mean), _block(records))


def _block(records: Tensor) -> int:
    return records.shape[-1] - HEADER_BYTES


kernels = loader(Path(__file__), Kernels)
