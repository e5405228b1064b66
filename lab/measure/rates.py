"""Rates that this machine's processor reaches in large products, measured in a moment.

A clock that a virtual machine reports is not the one that the processor runs at, and a library may
not use its widest registers (MKL has AVX2 alone for processors that are not Intel's). So what
estimates start from is measured, for each kind of product apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import conv2d

TRIALS = 7  # the fastest counts: others were disturbed, or found their memory unmapped
SIDE = 768  # of square matrices: 2.3 MB each
BATCH, CHANNELS, PIXELS, KERNEL = 8, 128, 28, 3  # a convolution of VGG-16 at an eighth of its area


COPIED_AT_ONCE = 16_000_000  # bytes that are timed together, so that the clock's own time is small


@dataclass(frozen=True)
class Rates:
    """Floating-point operations per second, fp32; a multiply-add is two."""

    product: float
    convolution: float


@lru_cache
def measured_rates(num_threads: int) -> Rates:
    """Measure the rates of so many threads, at most once in a process: 0.2 s on one core."""
    a, b = torch.rand(2, SIDE, SIDE)
    images = torch.rand(BATCH, CHANNELS, PIXELS, PIXELS)
    filters = torch.rand(CHANNELS, CHANNELS, KERNEL, KERNEL)
    convolved = 2 * images.numel() * CHANNELS * KERNEL**2
    with _threads(num_threads):
        return Rates(
            2 * SIDE**3 / _fastest_s(lambda: a @ b),
            convolved / _fastest_s(lambda: conv2d(images, filters, padding=KERNEL // 2)),
        )


def copy_rate(num_bytes: int, num_threads: int) -> float:
    """Measure the bytes per second, read and written, of copies of so many bytes.

    Small copies stay in a cache, large ones go to memory.
    """
    a = torch.ones(num_bytes // 8)  # half of the bytes are read, half are written
    b = torch.empty_like(a)
    repeats = max(1, COPIED_AT_ONCE // num_bytes)

    def copy() -> None:
        for _ in range(repeats):
            b.copy_(a)

    with _threads(num_threads):
        return repeats * (a.nbytes + b.nbytes) / _fastest_s(copy)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fastest_s(compute: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIALS):
        begin = time.perf_counter()
        compute()
        times.append(time.perf_counter() - begin)
    return min(times)
