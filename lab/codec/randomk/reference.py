"""The definition of the codec of random-k in plain torch; the C++ kernels draw the same places.

The draw is integer arithmetic on a counter, so that all devices agree. It is SplitMix64 (Steele,
Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15 - 2**64  # as int64, whose arithmetic wraps around
FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def encode(
    gradient: Tensor, residual: Tensor | None, values: Tensor, probe: Tensor, seed: int
) -> None:
    """See lab.codec.randomk.codec.encode."""
    compensated = gradient if residual is None else residual.add_(gradient)
    chosen = places(len(gradient), len(values), seed, gradient.device)
    torch.index_select(compensated, 0, chosen, out=values)
    probe += (compensated - compensated).sum()  # 0, or NaN
    if residual is not None:
        residual.index_fill_(0, chosen, 0)


def decode(values: Tensor, out: Tensor, seed: int) -> None:
    """See lab.codec.randomk.codec.decode."""
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
