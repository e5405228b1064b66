"""Random values, at places that all ranks draw alike: the codec of random-k.

One value is drawn from each of k equal ranges of a tensor: without replacement, in k operations
instead of a permutation's n, and with equal probability for all values if k divides n. The draw is
integer arithmetic on a counter, so that all devices agree: SplitMix64 (Steele, Lea and Flood, Fast
Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from lab.codec.kernels import bound, library

STEP = 0x9E3779B97F4A7C15 - 2**64  # as int64, whose arithmetic wraps around
FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class Kernels(Protocol):
    """Functions on contiguous tensors of one kind of device."""

    def encode(
        self, gradient: Tensor, residual: Tensor | None, values: Tensor, probe: Tensor, seed: int
    ) -> None:
        """Take k random values out of gradient + residual; the rest stays there.

        Args:
            gradient: float32 [n], n < 2**31.
            residual: float32 [n], replaced by what is not taken. None: no error feedback.
            values: float32 [k], k <= n, receives what is taken.
            probe: float32 [], becomes NaN if any of the n values is not finite, which the drawn
                values alone need not show.
            seed: from 0 to 2**63 - 1; the same one draws the same places on every device.
        """
        ...

    def decode(self, values: Tensor, out: Tensor, seed: int) -> None:
        """Put `values` at the places in `out`, float32 [n], that `seed` draws; zeros elsewhere."""
        ...


def kernels(device: torch.device) -> Kernels:
    """Return the fastest kernels for tensors of `device`."""
    found = library("randomk") if device.type == "cpu" else None
    return Reference() if found is None else Native(found)


class Native:
    """The kernels in C++ (cpp/randomk.cpp)."""

    def __init__(self, found: ctypes.CDLL) -> None:
        self._encode = bound(found, "randomk_encode", tensors=4, numbers=4)
        self._decode = bound(found, "randomk_decode", tensors=2, numbers=4)

    def encode(
        self, gradient: Tensor, residual: Tensor | None, values: Tensor, probe: Tensor, seed: int
    ) -> None:
        kept = None if residual is None else residual.data_ptr()
        sizes = gradient.numel(), values.numel()
        self._encode(
            *(gradient.data_ptr(), kept, values.data_ptr(), probe.data_ptr()),
            *(*sizes, seed, torch.get_num_threads()),
        )

    def decode(self, values: Tensor, out: Tensor, seed: int) -> None:
        sizes = out.numel(), values.numel()
        self._decode(values.data_ptr(), out.data_ptr(), *sizes, seed, torch.get_num_threads())


class Reference:
    """The definition, in plain torch."""

    def encode(
        self, gradient: Tensor, residual: Tensor | None, values: Tensor, probe: Tensor, seed: int
    ) -> None:
        compensated = gradient if residual is None else residual.add_(gradient)
        chosen = places(len(gradient), len(values), seed, gradient.device)
        torch.index_select(compensated, 0, chosen, out=values)
        probe += (compensated - compensated).sum()  # 0, or NaN
        if residual is not None:
            residual.index_fill_(0, chosen, 0)

    def decode(self, values: Tensor, out: Tensor, seed: int) -> None:
        out.zero_().index_copy_(0, places(len(out), len(values), seed, out.device), values)


def places(num_values: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Draw a place in each of `count` equal ranges of `num_values` values.

    Returns:
        int64 [count], in ascending order.
    """
    ranges = torch.arange(count + 1, device=device)
    edges = ranges * num_values // max(count, 1)
    drawn = _shifted(_mix(ranges[:-1] * STEP + seed), 32)
    return edges[:-1] + (drawn * edges.diff() >> 32)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * FACTORS[0]
    z = (z ^ _shifted(z, 27)) * FACTORS[1]
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, places: int) -> Tensor:
    """Shift to the right, filling with zeros: int64 would repeat its sign."""
    return z >> places & (1 << 64 - places) - 1
