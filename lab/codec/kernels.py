"""How kernels are found: in C++, compiled for this processor, and in Triton, if it works."""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.codec import build
from lab.codec.layout import RowBytes, Rows, lay_out

SOURCES = Path(__file__).with_name("cpp")


def library(name: str) -> ctypes.CDLL | None:
    """Return the compiled cpp/NAME.cpp for this processor; None: there is none, or none built."""
    return load(name, torch.backends.cpu.get_cpu_capability())


@functools.cache
def load(name: str, level: str) -> ctypes.CDLL | None:
    """Return the compiled cpp/NAME.cpp for a capability as torch names it; see `library`."""
    source = SOURCES / f"{name}.cpp"
    return build.load(source, level) if source.exists() else None


class Peers(tuple[Tensor, ...]):
    """Messages, uint8 [bytes] each, that lie apart: in the memory of several ranks of a node.

    Each begins at a multiple of 16 bytes.
    """

    @cached_property
    def offsets(self) -> Tensor:
        """Bytes from the first message to each, int64 [messages], where the messages are."""
        addresses = [message.data_ptr() for message in self]
        return torch.tensor(addresses, device=self[0].device) - addresses[0]


Messages = Tensor | Peers  # uint8 [messages, bytes], or a message alone; or such that lie apart
Residual = Tensor | None  # float32, like the values; replaced in place. None: no error feedback


def bound(library: ctypes.CDLL, name: str, tensors: int, numbers: int) -> Any:
    """Return a function that takes addresses of tensors (None: a null pointer) and then int64."""
    function = library[name]
    function.argtypes = [ctypes.c_void_p] * tensors + [ctypes.c_int64] * numbers
    function.restype = None
    return function


class Reading(NamedTuple):
    """How GPUs' kernels read the values of a codec.

    Attributes:
        kind: one of lab.codec.gpu.READINGS, or "largest".
        per_unit, unit_bytes: values of a unit of the payload, and its bytes. One of several bytes
            may end behind a row's last one if that is the last of its piece.
        num_levels: of the kind "levels".
        block: values of a row; 0: rows have any length.
        share: of the kind "largest": of values that are sent.
    """

    kind: str
    per_unit: int = 1
    unit_bytes: int = 1
    num_levels: int = 0
    block: int = 0
    share: float = 0.0


@functools.cache
def tried(
    module: str,
    device: torch.device,
    trial: Callable[[Any, torch.device], None],
    reading: Reading | None = None,
) -> Any:
    """Return the kernels of a module if a trial works on `device`; otherwise warn and return None.

    Triton compiles at a kernel's first launch, for which it needs a C compiler and Python's
    headers, and it supports only some GPUs and drivers: so only a trial shows whether it works.

    Args:
        trial: launches each kernel once.
        reading: of the codec, for the module that serves several.

    Raises:
        torch.OutOfMemoryError: the trial does not fit; not a fault of Triton's.
    """
    try:
        kernels = importlib.import_module(module).made(*([reading] if reading else []))
        trial(kernels, device)
        return kernels
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and drivers raise many types
        line = next(filter(str.strip, str(error).splitlines()), "no reason given").strip()
        name = type(error).__name__
        build.warn_slow(f"codecs: Triton does not work on {device} ({name}: {line})")
        return None


def on_gpu(reading: Reading, device: torch.device) -> Any:
    """Return Triton's kernels of a codec if they work on `device`; see `tried`."""
    return tried("lab.codec.gpu", device, _trial, reading)


def _trial(kernels: Any, device: torch.device) -> None:
    """Encode, sum and decode a row of zeros that any codec can encode."""
    layout = lay_out([Rows(0, 64, 64)], 65, 1, lambda columns: RowBytes(8, 8 * columns))
    values, finite = torch.zeros(65, device=device), torch.ones((), device=device).bool()
    message = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    kernels.encode(layout, values, values.clone(), message, finite)
    kernels.reduce(layout, message[None], values.clone(), message.clone())
    kernels.add_up(layout, message[None], values, 1, finite)
