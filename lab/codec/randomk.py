"""Random values, at places that all ranks draw alike: the codec of random-k.

One value is drawn from each of k equal ranges of a tensor: without replacement, in k operations
instead of a permutation's n, and with equal probability for all values if k divides n. The draw is
integer arithmetic on a counter, so that all devices agree: SplitMix64 (Steele, Lea and Flood, Fast
Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from lab.codec.kernels import bound, library

STEP = 0x9E3779B97F4A7C15 - 2**64  # as int64, whose arithmetic wraps around
FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class Draws:
    """Where the parameters of a bucket lie, and in a message the values that are drawn of each.

    Args:
        sizes: values of each parameter, below 2**31; they follow each other.
        counts: how many of each are drawn; these follow each other in the message.

    Attributes:
        table: int64 [parameters, 5], the first value of each, their number, the first in the
            message, their number and a seed, from 0 to 2**63 - 1.
    """

    def __init__(self, sizes: Sequence[int], counts: Sequence[int]) -> None:
        self.sizes, self.counts = list(sizes), list(counts)
        *starts, _ = accumulate(sizes, initial=0)
        *places, _ = accumulate(counts, initial=0)
        rows = [[*each, 0] for each in zip(starts, sizes, places, counts, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64).view(-1, 5)
        self._seeds = self.table[:, 4]

    def seed(self, seeds: Sequence[int]) -> None:
        """Draw other places: the same seeds draw the same ones on every device."""
        self._seeds.copy_(torch.tensor(seeds, dtype=torch.int64))


class Reference:
    """The definition in plain torch, on contiguous tensors, for all parameters of a bucket."""

    def encode(
        self,
        draws: Draws,
        gradients: Tensor,
        residuals: Tensor | None,
        message: Tensor,
        probe: Tensor,
    ) -> None:
        """Take random values out of gradients + residuals; the rest stays there.

        Args:
            gradients: float32 [n].
            residuals: float32 [n], replaced by what is not taken. None: no error feedback.
            message: float32 [k], receives what is taken.
            probe: float32 [], becomes NaN if any of the n values is not finite, which the drawn
                values alone need not show.
        """
        sums = gradients if residuals is None else residuals.add_(gradients)
        for seed, own, sent in _each(draws, sums, message):
            chosen = places(len(own), len(sent), seed, own.device)
            torch.index_select(own, 0, chosen, out=sent)
            probe += (own - own).sum()  # 0, or NaN
            if residuals is not None:
                own.index_fill_(0, chosen, 0)

    def decode(self, draws: Draws, message: Tensor, out: Tensor) -> None:
        """Put the values of `message` at their places in `out`, float32 [n]; zeros elsewhere."""
        out.zero_()
        for seed, own, sent in _each(draws, out, message):
            own.index_copy_(0, places(len(own), len(sent), seed, own.device), sent)


class Native(Reference):
    """The same in C++ (cpp/randomk.cpp)."""

    def __init__(self, found: ctypes.CDLL) -> None:
        self._encode = bound(found, "randomk_encode", tensors=5, numbers=2)
        self._decode = bound(found, "randomk_decode", tensors=3, numbers=2)

    def encode(
        self,
        draws: Draws,
        gradients: Tensor,
        residuals: Tensor | None,
        message: Tensor,
        probe: Tensor,
    ) -> None:
        kept = None if residuals is None else residuals.data_ptr()
        self._encode(
            *(gradients.data_ptr(), kept, message.data_ptr(), probe.data_ptr()),
            *(draws.table.data_ptr(), len(draws.sizes), torch.get_num_threads()),
        )

    def decode(self, draws: Draws, message: Tensor, out: Tensor) -> None:
        table, count = draws.table.data_ptr(), len(draws.sizes)
        self._decode(message.data_ptr(), out.data_ptr(), table, count, torch.get_num_threads())


def kernels(device: torch.device) -> Reference:
    """Return the fastest kernels for tensors of `device`."""
    found = library("randomk") if device.type == "cpu" else None
    return Reference() if found is None else Native(found)


def _each(draws: Draws, values: Tensor, message: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each parameter's seed, values, and its part of the message."""
    seeds = cast(list[int], draws.table[:, 4].tolist())  # pyright: ignore[reportUnknownMemberType]
    yield from zip(seeds, values.split(draws.sizes), message.split(draws.counts), strict=True)


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
