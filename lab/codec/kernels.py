"""The kernels of codecs in C++, called with tensors of CPUs."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.codec import build
from lab.codec.layout import Layout

SOURCES = Path(__file__).with_name("cpp")


def native(name: str, option: int) -> Native | None:
    """Return the C++ kernels of a codec for this processor; None: there are none, or none built."""
    library = _library(name, torch.backends.cpu.get_cpu_capability())
    return None if library is None else Native(library, name, option)


@functools.cache
def _library(name: str, level: str) -> ctypes.CDLL | None:
    source = SOURCES / f"{name}.cpp"
    return build.load(source, level) if source.exists() else None


class Native:
    """See lab.codec.base.Kernels. Python's lock is released while a kernel runs."""

    def __init__(self, library: ctypes.CDLL, name: str, option: int) -> None:
        self._option = option
        self._encode = _bound(library, f"{name}_encode", tensors=5, numbers=5)
        self._add_up = _bound(library, f"{name}_add_up", tensors=5, numbers=8)
        self._reduce = _bound(library, f"{name}_reduce", tensors=5, numbers=7)

    def encode(
        self, layout: Layout, values: Tensor, residual: Tensor | None, message: Tensor
    ) -> None:
        where = _where(layout)
        kept = None if residual is None else residual.data_ptr()
        self._encode(
            *(values.data_ptr(), kept, message.data_ptr()),
            *(*where, self._option, torch.get_num_threads()),
        )

    def add_up(
        self, layout: Layout, messages: Tensor, out: Tensor, divisor: int, finite: Tensor
    ) -> None:
        where = _where(layout)
        self._add_up(
            *(messages.data_ptr(), out.data_ptr(), finite.data_ptr(), *where),
            *(len(messages), messages.stride(0), divisor, self._option, torch.get_num_threads()),
        )

    def reduce(
        self, layout: Layout, messages: Tensor, residual: Tensor | None, out: Tensor
    ) -> None:
        where = _where(layout)
        kept = None if residual is None else residual.data_ptr()
        self._reduce(
            *(messages.data_ptr(), kept, out.data_ptr(), *where),
            *(len(messages), messages.stride(0), self._option, torch.get_num_threads()),
        )


def _bound(library: ctypes.CDLL, name: str, tensors: int, numbers: int) -> Any:
    function = library[name]
    function.argtypes = [ctypes.c_void_p] * tensors + [ctypes.c_int64] * numbers
    function.restype = None
    return function


def _where(layout: Layout) -> tuple[int, ...]:
    """Return the addresses of a layout's tables, their lengths, and how many values are encoded."""
    pieces, copies = layout.tables
    return pieces.data_ptr(), copies.data_ptr(), len(pieces), len(copies), layout.num_encoded
