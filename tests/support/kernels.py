"""A codec's kernels for each processor level, and inputs that every codec must bear."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from ctypes import CDLL
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lab.codec import build
from lab.codec.base import Codec, Native, Reference
from lab.codec.kernels import SOURCES

LEVELS = ("DEFAULT", "AVX2", "AVX512")
HERE = torch.backends.cpu.get_cpu_capability()
# Kernels of GPUs, by the module of lab.codec that launches them.
LAUNCHED = {
    "gpu": ("encode_rows", "decode_rows", "add_magnitudes"),
    "gpu_topk": (
        *("sample_rows", "collect_largest", "find_last", "write_largest", "spread_largest"),
    ),
    "gpu_randomk": ("take_drawn", "put_drawn"),
    "gpu_low_rank": ("multiply_rows", "multiply_columns", "multiply_factors", "orthonormalise"),
}
KINDS = ("normal", "zero", "equal", "negative", "denormal", "huge", "nan", "-inf")
LENGTHS = (1, 7, 16, 33, 1000, 70_001)  # the last is more than a piece of a thread


def library_at(level: str, name: str) -> CDLL:
    """Return the compiled kernels of a codec for `level`; skip where the processor lacks it."""
    if LEVELS.index(level) > LEVELS.index(HERE):
        pytest.skip(f"this processor has no {level}")
    found = build.load(SOURCES / f"{name}.cpp", level)
    assert found is not None
    return found


def of_codec(codec: Codec, level: str) -> Reference:
    """Return the kernels of a codec for a processor's level or "triton"; skip without either."""
    if level == "triton":
        pytest.importorskip("triton", reason="no triton here")
        return cast(Reference, OnGPU(importlib.import_module("lab.codec.gpu").made(codec.reading)))
    return Native(codec, library_at(level, codec.name))


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let codecs have GPUs' kernels, one at a time: Triton's interpreter is not made for threads.

    Ranks that are threads may then exchange by them. Spans are short: the interpreter reads all.
    """
    module, lock = pytest.importorskip("lab.codec.gpu", reason="no triton here"), threading.RLock()

    def alone(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            with lock:
                kernel(*arguments)

        return call

    for kind, name in product((module.Triton, module.TritonTopK), ("encode", "reduce", "add_up")):
        monkeypatch.setattr(kind, name, alone(getattr(kind, name)))
    monkeypatch.setattr(module, "SPAN", module.TILE)
    monkeypatch.setattr(Codec, "kernels", lambda codec, _: module.made(codec.reading))


class Counter:
    """A stand-in for kernels of Triton that counts their launches, and does nothing."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self._launch

    def _launch(self, *_: Any, **__: Any) -> None:
        self.launches += 1


class OnGPU:
    """Triton's kernels given copies on the GPU; without one, conftest.py has its interpreter on."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self._kernels, name))

    def _call(self, function: Any, *arguments: Any) -> None:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        copies = {id(tensor): tensor.to(self._device) for tensor in tensors}
        function(*(copies.get(id(argument), argument) for argument in arguments))
        for tensor in tensors:
            tensor.copy_(copies[id(tensor)])


def values_of(kind: str, *shape: int) -> Tensor:
    """Draw values of one of KINDS."""
    values = torch.randn(shape)
    if kind in ("nan", "-inf") and values.numel():
        values.view(-1)[values.numel() // 2] = float(kind)
    made = {"zero": torch.zeros_like(values), "negative": -values.abs() - 1}
    made["equal"] = torch.full_like(values, 0.3)
    scale = {"denormal": 1e-41, "huge": 3e37}.get(kind, 1.0)
    return made.get(kind, values) * scale


def unaligned(values: Tensor) -> Tensor:
    """Return a copy of a vector that begins four bytes after a cache line."""
    copy = torch.empty(len(values) + 1, dtype=values.dtype)[1:]
    return copy.copy_(values)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Compare to 1e-6 of the largest value, and non-finite values exactly."""
    finite = theirs.isfinite()
    if not torch.equal(finite, ours.isfinite()):
        return False
    largest = float(theirs[finite].abs().max()) if finite.any() else 0.0
    same_infinities = torch.equal(ours[~finite].nan_to_num(0), theirs[~finite].nan_to_num(0))
    return same_infinities and torch.allclose(
        ours[finite], theirs[finite], rtol=1e-6, atol=1e-6 * largest
    )


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Compare bit for bit, but any NaN equals any other."""
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(
        ours.nan_to_num(0), theirs.nan_to_num(0)
    )
