"""Reduce-scatters and all-gathers, which strategies that shard a model are made of.

A reduce-scatter is the first half of an exchange: what that sends to one rank, in the same codec,
with the sums in float32 and in rank order. The second half, which sends means to all ranks, is left
out: a rank keeps its sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.codecs import Int8
from lab.distributed.comm import Collective, Comm, SummedParts
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange, RankOfSize, runs_as_the_labs
from lab.exchange.bucket import GradBucket, Plans
from lab.exchange.compressed import Coded, Messages
from lab.exchange.cost import Sizes
from lab.exchange.memory import Columns

GATHERED = Int8(block_size=1024)  # weights: ZeRO++'s qwZ (Wang et al. 2023, section 4.1)


@dataclass
class ScatterLayout:
    """Where parameters lie in gradients [N, n], and memory that is kept from step to step.

    Attributes:
        columns: by parameter name. Row r holds each one's r-th part of N.
    """

    columns: Mapping[str, Columns]
    plans: Plans = field(default_factory=Plans)


class Scatter(ABC):
    """A reduce-scatter. One object serves all units of a rank."""

    @abstractmethod
    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: ScatterLayout) -> None:
        """Fill `output`, float32 [n], with the sum over the ranks of their `gradients[rank]`.

        Args:
            gradients: float32 [N, n]; its memory may be overwritten.
        """


class Exact(Scatter):
    """Sends gradients as `dtype`; sums are in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: ScatterLayout) -> None:
        needed = self.needs_spare(comm.backend)
        spare = layout.plans.scratch("spare", gradients, *gradients.shape) if needed else None
        self.begin(output, gradients, comm, spare).wait()

    def needs_spare(self, backend: str) -> bool:
        """Return whether `begin` needs memory for what travels; NCCL's float32 does not."""
        return self._dtype != torch.float32 or backend != "nccl"

    def memory_bytes(self, sizes: Sizes) -> float:
        """Return the bytes that a rank needs for buckets, sent as fast as they fill."""
        return 4.0 * sizes.largest * self.needs_spare(sizes.backend)

    def begin(
        self, output: Tensor, gradients: Tensor, comm: Comm, spare: Tensor | None
    ) -> Collective:
        """Begin `sum`.

        Args:
            output: may be `gradients[rank]`.
            spare: memory like `gradients`, if it is needed; free again after the wait.
        """
        if spare is None or self._dtype == torch.float32:
            return comm.ireduce_scatter(output, gradients, spare)
        sent, received = spare.view(-1).view(self._dtype).view(2, *gradients.shape)
        sent.copy_(gradients)
        return SummedParts(comm.iall_to_all(received, sent), received, output)


class _ScatterPlan(Messages):
    """Messages of equal parts, one for each rank, which keeps the sum of its own."""

    def __init__(self, codec: Codec, gradients: Tensor, comm: RankOfSize) -> None:
        layout = codec.layout_of_parts(gradients.numel() // comm.size, comm.size)
        super().__init__(codec, layout, comm, gradients)
        self.own = layout.part(comm.rank)

    def run(
        self, flat: Tensor, residual: Tensor | None, output: Tensor, comm: Comm, divisor: int
    ) -> Iterator[Collective]:
        self.kernels.encode(self.layout, flat, residual, self.message, self.finite)
        yield comm.iall_to_all(self.received, self.lines)
        self.kernels.add_up(self.own, self.received, output, divisor, self.finite)


class _BucketPlan(_ScatterPlan):
    """The same for a bucket, whose residuals are kept by parameter."""

    def __init__(self, exchange: Coded, bucket: GradBucket, comm: RankOfSize) -> None:
        super().__init__(exchange.codec, bucket.flat, comm)
        self.bound = exchange.memory.bind(bucket, [(0, len(bucket.flat))])


class InCodec(Scatter):
    """Sends messages of an exchange's codec, and keeps what these leave out in its memory.

    So delivered sums + residuals = true sums, as in the first half of the exchange. Rows run across
    parameters, since a unit's gradients are laid out so.
    """

    def __init__(self, exchange: Coded) -> None:
        self._exchange = exchange

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: ScatterLayout) -> None:
        plan = layout.plans.get("plan")
        if plan is None:
            plan = layout.plans["plan"] = _ScatterPlan(self._exchange.codec, gradients, comm)
        residual = self._exchange.memory.bind_columns(gradients, layout.columns)
        kept = None if residual is None else residual.view(-1)
        for collective in plan.run(gradients.view(-1), kept, output, comm, 1):
            collective.wait()

    def mean_of(self, bucket: GradBucket, output: Tensor, comm: Comm) -> Iterator[Collective]:
        """Fill `output` with the mean of this rank's part of a bucket; yield as Exchange.stages.

        Parts are equal; their length times the number of ranks is that of `bucket.flat`.
        """
        plan = self._exchange.planned(bucket, comm, _BucketPlan)
        return plan.run(bucket.flat, plan.bound.own, output, comm, comm.size)

    def memory_bytes(self, sizes: Sizes) -> float:
        """Return the bytes that a rank needs for buckets: residuals, and messages both ways."""
        messages = 2 * self._exchange.codec.bytes_per_value()
        return sizes.n * (4.0 * self._exchange.keeps_residuals + messages)


def scatter_of(exchange: Exchange) -> Exact | InCodec:
    """Return the first half of `exchange`.

    Raises:
        ValueError: it has none of its own.
    """
    if runs_as_the_labs(exchange):
        if isinstance(exchange, AllReduce):
            return Exact(exchange.dtype)
        if isinstance(exchange, Coded) and not exchange.warmup_steps:
            return InCodec(exchange)
    raise ValueError(
        f"exchange={type(exchange).__name__} has no reduce-scatter; allowed: allreduce, bf16, "
        "fp16, int8, int4, signsgd_ef, topk, onebit without warmup_steps, and any codec over the "
        "lab's own paths"
    )


class TwoLevels(Scatter):
    """Sums inside nodes before a codec rounds again and the sums cross (ZeRO++, qgZ: Wang et al.
    2023, section 4.3).

    Of M nodes with L ranks, rank l of a node first receives from its node's ranks what the l-th
    ranks of all nodes are due, and adds it: M parts. Then the l-th ranks exchange these sums. Each
    value is rounded twice, however many ranks there are, and a node sends (M-1)/M of a gradient to
    others, 1/L of what its ranks would send each for itself. The order of the parts that the paper
    swaps to keep them in place is that of the rows here. One object serves one unit, since it has
    the memory of both levels.

    Args:
        exchange: its first half runs at both levels.
        inside, across: this rank's node, and the ranks with its number on all nodes. Rank l of node
            m is number m * L + l of all.

    Raises:
        ValueError: the exchange has no reduce-scatter, or keeps residuals, of which there would be
            two of different lengths.
    """

    def __init__(self, exchange: Exchange, inside: Comm, across: Comm) -> None:
        require_no_residuals(exchange)
        self._scatter = scatter_of(exchange)
        self._inside, self._across = inside, across
        self._first, self._second = ScatterLayout({}), ScatterLayout({})

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: ScatterLayout) -> None:
        per_node, nodes, n = self._inside.size, self._across.size, gradients.shape[1]
        by_local_rank = layout.plans.scratch("by local rank", gradients, per_node, nodes, n)
        by_local_rank.copy_(gradients.view(nodes, per_node, n).transpose(0, 1))
        of_node = layout.plans.scratch("of node", gradients, nodes, n)
        parts = by_local_rank.view(per_node, -1)
        self._scatter.sum(of_node.view(-1), parts, self._inside, self._first)
        self._scatter.sum(output, of_node, self._across, self._second)


def require_no_residuals(exchange: Exchange) -> None:
    """Raise ValueError if an exchange keeps residuals."""
    if exchange.keeps_residuals:
        raise ValueError(
            "exchange.error_feedback=true: sync.reduce_scatter=two_levels stores no residuals; "
            "set exchange.error_feedback=false, or sync.reduce_scatter=lab"
        )


def gather_bytes(
    output: Tensor, own: Tensor, comm: Comm, plans: Plans, codec: Codec = GATHERED
) -> None:
    """Fill `output` with all ranks' `own`, rounded to a byte for each value, alike on all ranks.

    Args:
        output: float32 [N * n].
        own: float32 [n], may be a part of `output`.
        plans: keeps layouts and messages for the next call.
    """
    if (key := (len(own), comm.size)) not in plans:
        layout = codec.layout_of_parts(len(own), comm.size)
        plans[key] = layout, Messages(codec, layout.part(0), comm, own)
    layout, plan = plans[key]
    plan.kernels.encode(plan.layout, own, None, plan.message, plan.finite)
    comm.all_gather(plan.received, plan.message)
    plan.kernels.add_up(layout, plan.received.view(1, -1), output, 1, plan.finite)
