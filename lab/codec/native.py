"""Call C++ kernels with tensors: which kernels serve which tensors, and how these are passed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lab.codec import build

K = TypeVar("K")


class Memory:
    """The C type of a tensor's memory; None is a null pointer."""

    @staticmethod
    def from_param(tensor: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def loader(codec: Path, make: Callable[[ctypes.CDLL], K]) -> functools._lru_cache_wrapper[K | None]:  # pyright: ignore[reportPrivateUsage]
    """Return a function of a processor's level that builds a codec's kernels for it, once.

    It returns None, after a warning, if they cannot be built.

    Args:
        codec: a file beside the codec's kernels.cpp.
        make: the signatures of the library's functions.
    """

    @functools.cache
    def kernels(level: str) -> K | None:
        library = build.load(codec.with_name("kernels.cpp"), level)
        return None if library is None else make(library)

    return kernels


def bind(function: Any, tensors: int, numbers: int) -> Callable[..., None]:
    """Return a C function as one of Python; releases the interpreter while it runs.

    Args:
        function: takes the memory of `tensors` tensors, then `numbers` integers (int64_t), then
            the number of threads, which the returned function adds.
    """
    function.argtypes = [Memory] * tensors + [ctypes.c_int64] * (numbers + 1)
    function.restype = None
    return lambda *arguments: function(*arguments, torch.get_num_threads())


def fitting(kernels: Callable[[str], K | None], *tensors: Tensor | None) -> K | None:
    """Return the C++ kernels for these tensors of one device; None: plain torch must do.

    Args:
        kernels: returns the kernels for a level (lab.codec.build.load), or None.
        tensors: those of the call. All must be contiguous, on a CPU; None is left out.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in present):
        return kernels(torch.backends.cpu.get_cpu_capability())
    return None
