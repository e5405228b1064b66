"""Random-k: all ranks draw the same indices, so that values travel without them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from lab.codec import randomk
from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Ranks
from lab.exchange.bucket import GradBucket
from lab.exchange.coded import Lossy
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.layout import num_sent
from lab.exchange.memory import Memory
from lab.settings import checks


class RandomK(Lossy):
    """The same random values on all ranks, and error feedback (Stich et al. 2018, Algorithm 1).

    The draw (lab.codec.randomk) depends on seed, step and parameter name alone, so that ranks agree
    and a resumed run draws the same. A rank sends 8(k+1)(N-1)/N bytes: one more value tells whether
    all gradients were finite.

    Args:
        ratio: k is this share of the values of each parameter, rounded up.
        error_feedback: see Memory.
        seed: of the draw.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, ratio: float = 0.3, error_feedback: bool = True, seed: int = 0) -> None:
        super().__init__(Memory(error_feedback))
        self.ratio = checks.number("exchange.ratio", ratio, above=0, at_most=1)
        self.seed = checks.whole("exchange.seed", seed)

    def add_cost(self, costs: Costs) -> bool:
        n, sent = costs.n, sum(num_sent(shape, self.ratio) for shape in costs.shapes)
        costs.codec(12 * n + 8 * sent, in_torch=16 * n + 160 * sent)
        costs.wire(costs.exact(sent))
        costs.codec(4 * n + 12 * sent, in_torch=4 * n + 160 * sent)
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        return Needs(kept=4 * sizes.n * (self.memory.keeps + self.ratio))

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        plan = self.planned(bucket, comm, _Plan)
        plan.probe.zero_()  # or NaN if any value is not finite, drawn or not
        values, sent = bucket.flat[: plan.num_values], plan.message[:-1]
        start = zlib.crc32(f"{self.seed} {bucket.step} ".encode())
        plan.draws.seed([zlib.crc32(name, start) for name in plan.names])
        plan.kernels.encode(plan.draws, values, plan.residuals, sent, plan.probe)
        yield comm.iall_reduce(plan.message)
        bucket.finite = plan.probe.isfinite()
        plan.message.div_(comm.size)
        plan.kernels.decode(plan.draws, sent, values)


class _Plan:
    """A bucket's message: the values drawn from each parameter, in their order, and a probe."""

    def __init__(self, exchange: RandomK, bucket: GradBucket, comm: Ranks) -> None:
        self.kernels = randomk.kernels(bucket.flat.device)
        self.names = [name.encode() for name in bucket.shapes]
        sizes = [shape.numel() for shape in bucket.shapes.values()]
        counts = [num_sent(shape, exchange.ratio) for shape in bucket.shapes.values()]
        self.draws, self.num_values = randomk.Draws(sizes, counts), sum(sizes)
        self.message = bucket.flat.new_zeros(sum(counts) + 1)
        self.probe = self.message[-1]
        self.bound = exchange.memory.bind(bucket, [(0, self.num_values)])
        kept = self.bound.own
        self.residuals = None if kept is None else kept[: self.num_values]
