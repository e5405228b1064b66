"""The 1-bit codec in C++, for CPU tensors: the signatures of kernels.cpp."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from lab.codec import build

SOURCE = Path(__file__).with_name("kernels.cpp")


@functools.cache
def kernels(level: str) -> Kernels | None:
    """Return the kernels for processors of `level`; None, after a warning, if not buildable."""
    library = build.load(SOURCE, level)
    return None if library is None else Kernels(library)


class Kernels:
    """The functions of one compiled library; lab.codec.onebit.codec describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._encode, self._decode = library.onebit_encode, library.onebit_decode
        self._reduce = library.onebit_reduce
        self._encode.argtypes = [address] * 4 + [number] * 7
        self._decode.argtypes = [address] * 3 + [number] * 7
        self._reduce.argtypes = [address] * 2 + [number] * 3 + [address] * 3 + [number] * 4
        self._encode.restype = self._decode.restype = self._reduce.restype = None

    def encode(
        self,
        gradient: Tensor,
        residual: Tensor | None,
        threshold: str,
        scales: Tensor,
        bits: Tensor,
    ) -> None:
        self._encode(
            gradient.data_ptr(),
            None if residual is None else residual.data_ptr(),
            scales.data_ptr(),
            bits.data_ptr(),
            *gradient.shape,
            *_lines(scales, bits),
            threshold == "mean",
            torch.get_num_threads(),
        )

    def decode(self, scales: Tensor, bits: Tensor, out: Tensor, add: bool) -> None:
        self._decode(
            scales.data_ptr(),
            bits.data_ptr(),
            out.data_ptr(),
            *out.shape,
            *_lines(scales, bits),
            add,
            torch.get_num_threads(),
        )

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
        self._reduce(
            scales.data_ptr(),
            bits.data_ptr(),
            len(bits),
            scales.stride(0),
            bits.stride(0),
            None if residual is None else residual.data_ptr(),
            out_scales.data_ptr(),
            out_bits.data_ptr(),
            *total.shape,
            threshold == "mean",
            torch.get_num_threads(),
        )


def _lines(scales: Tensor, bits: Tensor) -> tuple[int, int, int]:
    """Return rows per line, and the strides of lines in float32 values and in bytes."""
    return scales.shape[1], scales.stride(0), bits.stride(0)
