"""Messages of a codec between ranks: in two stages, or from each rank to all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.layout import Layout
from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Kept, Ranks, Relayed, Shapes, Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Needs, Sizes
from lab.exchange.memory import Bound, Memory

P = TypeVar("P", bound="Planned")


class Lossy(Staged):
    """An exchange that leaves something out of gradients, which a memory keeps for later steps.

    Attributes:
        warmup_steps: steps at first in which values travel as they are.
    """

    exact = False
    warmup_steps = 0

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @property
    def keeps_residuals(self) -> bool:
        return self.memory.keeps

    def is_coded(self, bucket: GradBucket) -> bool:
        """Return whether `bucket` is compressed in its step; if not, values travel as they are."""
        return bucket.step >= self.warmup_steps

    def planned(self, bucket: GradBucket, comm: Ranks, make: Callable[..., P]) -> P:
        """Return what stays from step to step for `bucket`, made anew where residuals moved.

        Args:
            make: called with this exchange, `bucket` and `comm`.
        """
        made_for = comm.size, self.is_coded(bucket)
        found = bucket.plans.get(self)
        if found is None or found[0] != made_for or not self.is_current(found[1]):
            found = bucket.plans[self] = made_for, make(self, bucket, comm)
        return found[1]

    def is_current(self, plan: Any) -> bool:
        """Return whether a plan still has what this exchange keeps."""
        return plan.bound.current

    def add_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        self.memory.add_to(bucket)

    def flush_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        self.memory.flush_to(bucket)
        bucket.plans.pop(self, None)

    def kept(self, shapes: Shapes, comm: Comm) -> Iterator[Kept]:
        return self.memory.kept()

    def error_bound(self, largest: float, size: int) -> float:
        return 0.0 if self.memory.keeps else math.inf

    def state_dict(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state)

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return self.memory.shares(states, size)


class Planned(Protocol):
    """The part of a bucket's exchange that stays; see Lossy.planned.

    Attributes:
        bound: its residuals.
    """

    bound: Bound


class Coded(Lossy):
    """A mean of gradients that travel as messages of a codec."""

    def __init__(self, codec: Codec, memory: Memory) -> None:
        super().__init__(memory)
        self.codec = codec

    def layout(self, bucket: GradBucket, parts: int) -> Layout:
        """Lay out the messages of `bucket`, of `parts` lines; once for as many."""
        key = "layout", id(self.codec), parts, self.is_coded(bucket)
        if key not in bucket.plans:
            shapes = bucket.shapes if self.is_coded(bucket) else {}
            bucket.plans[key] = self.codec.layout(shapes, len(bucket.flat), parts)
        return bucket.plans[key]


class _Plan:
    """The part that stays from step to step: where values lie in messages, and memory for these.

    Attributes:
        outgoing: uint8, a message of this rank's gradients; lines end in zeros.
        finite: bool [], receives whether all values are.
    """

    def __init__(self, exchange: Coded, bucket: GradBucket, parts: int) -> None:
        flat = bucket.flat
        self.layout = exchange.layout(bucket, parts)
        self.kernels = exchange.codec.kernels(flat.device)
        self.coded = sorted((p.start, p.stop) for p in self.layout.pieces)
        self.outgoing = flat.new_zeros(self.layout.num_bytes, dtype=torch.uint8)
        self.finite = torch.ones((), dtype=torch.bool, device=flat.device)


class _TwoStagePlan(_Plan):
    """The same for a rank that sums one part of the bucket.

    Attributes:
        own: the layout of this part.
        lines, line: `outgoing` as uint8 [ranks, line] and [1, bytes].
        received: uint8 [ranks, line], other ranks' messages of it.
        reply: uint8 [line], their sum.
    """

    def __init__(self, exchange: Coded, bucket: GradBucket, comm: Ranks) -> None:
        super().__init__(exchange, bucket, comm.size)
        self.own = self.layout.part(comm.rank)
        self.lines, self.line = self.outgoing.view(comm.size, -1), self.outgoing.view(1, -1)
        self.received = self.outgoing.new_empty(comm.size, self.layout.line_bytes)
        self.reply = self.outgoing.new_zeros(self.layout.line_bytes)
        self.bound = exchange.memory.bind(bucket, self.coded, *self._owned(comm.rank))

    def _owned(self, rank: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return where the encoded values of this rank's part lie: see Memory.bind."""
        low, high = (n * self.layout.line_bytes for n in (rank, rank + 1))
        pieces = [piece for piece in self.layout.pieces if low <= piece.payload < high]
        owned = [
            (piece.start, own.start, piece.stop - piece.start)
            for piece, own in zip(pieces, self.own.pieces, strict=True)
        ]
        return owned, self.own.num_values


class TwoStage(Coded, Relayed):
    """Sums in two stages (Seide et al. 2014, section 3), each of which encodes.

    1. Each rank encodes its gradients and keeps what that leaves out. Part r of every rank's
       message goes to rank r.
    2. Rank r decodes these parts, its own too, adds them in rank order and encodes the sum, of
       which it keeps what that leaves out. Every rank receives all sums, decodes them and divides
       by N.

    So a rank sends 2(N-1)/N messages, whatever N is. A row with a value that is not finite is read
    as such by all ranks, which mark the bucket.
    """

    def __init__(self, codec: Codec, memory: Memory) -> None:
        super().__init__(codec, memory)
        memory.of_sums = True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count residuals, and messages: sent, later all sums; received; and of the own sum."""
        part, residuals = 1 / sizes.N, 4.0 * self.memory.keeps
        per_value = residuals * (1 + part) + self.codec.bytes_per_value() * (2 + part)
        return Needs(kept=sizes.n * per_value)

    def message_bytes(self, bucket: GradBucket, size: int) -> int:
        return self.layout(bucket, size).num_bytes

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        plan = self.planned(bucket, comm, _TwoStagePlan)
        yield from self._stages(plan, bucket.flat, comm, plan.lines)
        plan.kernels.add_up(plan.layout, plan.line, bucket.flat, comm.size, plan.finite)
        bucket.finite = plan.finite

    def sum(self, bucket: GradBucket, comm: Comm, message: Tensor) -> Iterator[Collective]:
        plan = self.planned(bucket, comm, _TwoStagePlan)
        return self._stages(plan, bucket.flat, comm, message.view_as(plan.lines))

    def _stages(
        self, plan: _TwoStagePlan, flat: Tensor, comm: Comm, sums: Tensor
    ) -> Iterator[Collective]:
        """Fill `sums`, uint8 [ranks, line]; it may be the memory of what was sent."""
        plan.kernels.encode(plan.layout, flat, plan.bound.own, plan.outgoing, plan.finite)
        yield comm.iall_to_all(plan.received, plan.lines)
        plan.kernels.reduce(plan.own, plan.received, plan.bound.owned, plan.reply)
        yield comm.iall_gather(sums, plan.reply)

    def decode(self, message: Tensor, bucket: GradBucket, size: int, divisor: int) -> None:
        bucket.finite = torch.ones((), dtype=torch.bool, device=message.device)
        kernels, layout = self.codec.kernels(message.device), self.layout(bucket, size)
        kernels.add_up(layout, message.view(1, -1), bucket.flat, divisor, bucket.finite)


class AllGather(Coded):
    """Each rank sends its message to all, which decode it and add in rank order.

    A rank sends N-1 messages, so it is for few ranks, or for messages that are short.
    """

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count the residual, and the messages of this rank and of all."""
        messages = self.codec.bytes_per_value() * (1 + sizes.N)
        return Needs(kept=sizes.n * (4.0 * self.memory.keeps + messages))

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        plan = self.planned(bucket, comm, _AllGatherPlan)
        own = plan.bound.own
        plan.kernels.encode(plan.layout, bucket.flat, own, plan.outgoing, plan.finite)
        yield comm.iall_gather(plan.received, plan.outgoing)
        plan.kernels.add_up(plan.layout, plan.received, bucket.flat, comm.size, plan.finite)
        bucket.finite = plan.finite


class _AllGatherPlan(_Plan):
    def __init__(self, exchange: Coded, bucket: GradBucket, comm: Ranks) -> None:
        super().__init__(exchange, bucket, 1)
        self.received = self.outgoing.new_empty(comm.size, self.layout.num_bytes)
        self.bound = exchange.memory.bind(bucket, self.coded)
