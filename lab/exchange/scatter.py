"""Reduce-scatters of gradients that are laid out by the rank they go to, exact or compressed.

They are the first halves of exchanges by name: what that sends to one rank, in the same codec, with
the sums in float32 and in rank order. The second half, which sends means to all ranks, is left out:
a rank keeps its sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.distributed.collective import Collective, SummedParts
from lab.distributed.comm import Comm
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange
from lab.exchange.bucket import Plans
from lab.exchange.coded import Coded
from lab.exchange.memory import Columns


@dataclass
class Layout:
    """Where parameters lie in gradients [N, n], and memory that is kept from step to step.

    Attributes:
        columns: by parameter name. Row r holds each one's r-th part of N.
    """

    columns: Mapping[str, Columns]
    plans: Plans = field(default_factory=Plans)


class Scatter(ABC):
    """A reduce-scatter. One object serves all units of a rank."""

    @abstractmethod
    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: Layout) -> None:
        """Fill `output`, float32 [n], with the sum over the ranks of their `gradients[rank]`.

        Args:
            gradients: float32 [N, n]; its memory may be overwritten.
        """


class Exact(Scatter):
    """Sends gradients as `dtype`; sums are in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: Layout) -> None:
        needed = self.needs_spare(comm)
        spare = layout.plans.scratch("spare", gradients, *gradients.shape) if needed else None
        self.begin(output, gradients, comm, spare).wait()

    def needs_spare(self, comm: Comm) -> bool:
        """Return whether `begin` needs memory for what travels; NCCL's float32 does not."""
        return self._dtype != torch.float32 or comm.backend != "nccl"

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


class InCodec(Scatter):
    """Sends messages of an exchange's codec, and keeps what these leave out in its memory.

    So delivered sums + residuals = true sums, as in the first half of the exchange. Rows run across
    parameters, since a unit's gradients are laid out so.
    """

    def __init__(self, exchange: Coded) -> None:
        self._exchange = exchange

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: Layout) -> None:
        plan = layout.plans.get("plan")
        if plan is None:
            plan = layout.plans["plan"] = _Plan(self._exchange.codec, gradients, comm)
        residual = self._exchange.memory.bind_columns(gradients, layout.columns)
        kept = None if residual is None else residual.view(-1)
        plan.kernels.encode(plan.layout, gradients.view(-1), kept, plan.sent)
        comm.all_to_all(plan.received, plan.sent.view_as(plan.received))
        plan.kernels.add_up(plan.own, plan.received, output, 1, plan.finite)


class _Plan:
    """The part that stays from step to step: the layout of messages, and their memory."""

    def __init__(self, codec: Codec, gradients: Tensor, comm: Comm) -> None:
        size, num_values = gradients.shape
        self.layout = codec.layout_of_parts(num_values, size)
        self.own = self.layout.part(comm.rank)
        self.kernels = codec.kernels(gradients.device)
        self.sent = gradients.new_zeros(self.layout.num_bytes, dtype=torch.uint8)
        self.received = self.sent.new_empty(size, self.layout.line_bytes)
        self.finite = torch.ones((), dtype=torch.bool, device=gradients.device)


def scatter_of(exchange: Exchange) -> Scatter:
    """Return the first half of `exchange`.

    Raises:
        ValueError: it has none of its own.
    """
    if isinstance(exchange, AllReduce):
        return Exact(exchange.dtype)
    if isinstance(exchange, Coded) and not getattr(exchange, "warmup_steps", 0):
        return InCodec(exchange)
    raise ValueError(
        f"exchange={type(exchange).__name__}: has no reduce-scatter; allowed are allreduce, bf16, "
        "fp16, int8, int4, signsgd_ef, topk, and onebit without warmup_steps"
    )
