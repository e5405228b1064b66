"""Random-k: all ranks draw the same places, so that values travel without them.

One value is drawn from each of k equal ranges of a tensor: without replacement, in k operations
instead of a permutation's n, and with equal probability for all values if k divides n. The draw is
integer arithmetic on a counter, so that all devices agree: SplitMix64 (Steele, Lea and Flood, Fast
Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lab.codec.kernels import bound, library, tried
from lab.codec.layout import Draws
from lab.distributed.comm import Collective, Comm
from lab.exchange.base import RankOfSize
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import Lossy
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.layout import num_sent
from lab.exchange.memory import Memory
from lab.settings import checks

STEP = 0x9E3779B97F4A7C15 - 2**64  # as int64, whose arithmetic wraps around
SEEDS = 2**31 - 1  # the largest of a step
FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class RandomK(Lossy):
    """The same random values on all ranks, and error feedback (Stich et al. 2018, Algorithm 1).

    The draw depends on seed, step and parameter name alone, so that ranks agree and a resumed run
    draws the same. A rank sends 8(k+1)(N-1)/N bytes: one more value tells whether all gradients
    were finite.

    Args:
        ratio: k is this share of the values of each parameter, rounded up.
        error_feedback: see Memory.
        seed: of the draw.
    """

    steady_from = None  # the host draws other places for each step

    def __init__(self, ratio: float = 0.3, error_feedback: bool = True, seed: int = 0) -> None:
        super().__init__(Memory(error_feedback))
        self.ratio = checks.number("exchange.ratio", ratio, above=0, at_most=1)
        self.seed = checks.integer("exchange.seed", seed, 0)

    def add_cost(self, costs: Costs) -> bool:
        n, sent = costs.n, sum(num_sent(shape, self.ratio) for shape in costs.shapes)
        costs.codec(12 * n + 8 * sent)
        costs.wire(costs.exact(sent))
        costs.codec(4 * n + 12 * sent)
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        return Needs(kept=4 * sizes.n * (self.memory.keeps + self.ratio))

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        plan = self.planned(bucket, comm, _DrawPlan)
        plan.probe.zero_()  # or NaN if any value is not finite, drawn or not
        values, sent = bucket.flat[: plan.num_values], plan.message[:-1]
        plan.draws.seed = zlib.crc32(f"{self.seed} {bucket.step} ".encode()) & SEEDS
        plan.kernels.encode(plan.draws, values, plan.residuals, sent, plan.probe)
        yield comm.iall_reduce(plan.message)
        torch.eq(plan.probe, 0, out=plan.finite)
        bucket.finite = plan.finite
        plan.kernels.decode(plan.draws, sent, values, comm.size)


class _DrawPlan:
    """A bucket's message: the values drawn from each parameter, in their order, and a probe."""

    def __init__(self, exchange: RandomK, bucket: GradBucket, comm: RankOfSize) -> None:
        self.kernels = kernels(bucket.flat.device)
        keys = [zlib.crc32(name.encode()) << 31 for name in bucket.shapes]
        sizes = [shape.numel() for shape in bucket.shapes.values()]
        counts = [num_sent(shape, exchange.ratio) for shape in bucket.shapes.values()]
        self.draws, self.num_values = Draws(sizes, counts, keys), sum(sizes)
        self.message = bucket.flat.new_zeros(sum(counts) + 1)
        self.probe, self.finite = self.message[-1], torch.ones_like(self.message[-1]).bool()
        self.bound = exchange.memory.bind(bucket, [(0, self.num_values)])
        kept = self.bound.own
        self.residuals = None if kept is None else kept[: self.num_values]


class RandomKReference:
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

    def decode(self, draws: Draws, message: Tensor, out: Tensor, divisor: int) -> None:
        """Put values of `message` over `divisor` at their places in `out`, [n]; zeros elsewhere."""
        message.div_(divisor)
        out.zero_()
        for seed, own, sent in _each(draws, out, message):
            own.index_copy_(0, places(len(own), len(sent), seed, own.device), sent)


class NativeRandomK(RandomKReference):
    """The same in C++ (lab/codec/cpp/randomk.cpp)."""

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
            *(draws.table.ctypes.data, len(draws.sizes), torch.get_num_threads()),
        )

    def decode(self, draws: Draws, message: Tensor, out: Tensor, divisor: int) -> None:
        message.div_(divisor)
        table, count = draws.table.ctypes.data, len(draws.sizes)
        self._decode(message.data_ptr(), out.data_ptr(), table, count, torch.get_num_threads())


def kernels(device: torch.device) -> RandomKReference:
    """Return the fastest kernels for tensors of `device`."""
    if device.type == "cuda":
        return tried("lab.codec.gpu_randomk", device, _trial) or RandomKReference()
    found = library("randomk") if device.type == "cpu" else None
    return RandomKReference() if found is None else NativeRandomK(found)


def _trial(kernels: RandomKReference, device: torch.device) -> None:
    draws, values = Draws([64], [8], [1]), torch.zeros(2, 64, device=device)
    message = torch.zeros(9, device=device)
    kernels.encode(draws, values[0], values[1], message[:8], message[8])
    kernels.decode(draws, message[:8], values[0], 2)


def _each(draws: Draws, values: Tensor, message: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each parameter's seed, values, and its part of the message."""
    seeds: list[int] = draws.table[:, 4].tolist()
    yield from zip(seeds, values.split(draws.sizes), message.split(draws.counts), strict=True)


def places(num_values: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Draw a place in each of `count` equal ranges of `num_values`; int64 [count], ascending."""
    ranges = torch.arange(count + 1, device=device)
    edges = ranges * num_values // max(count, 1)
    z = ranges[:-1] * STEP + seed
    z = (z ^ _shifted(z, 30)) * FACTORS[0]
    z = (z ^ _shifted(z, 27)) * FACTORS[1]
    drawn = _shifted(z ^ _shifted(z, 31), 32)
    return edges[:-1] + (drawn * edges.diff() >> 32)


def _shifted(z: Tensor, places: int) -> Tensor:
    """Shift to the right, filling with zeros: int64 would repeat its sign."""
    return z >> places & (1 << 64 - places) - 1
