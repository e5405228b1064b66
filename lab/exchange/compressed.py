"""Compressed exchanges: messages of a codec over a path, and what they leave out kept or dropped.

A path is TwoStage, Symmetric, or AllGather; which codec and memory go over it is its argument.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lab.codec import codecs
from lab.codec.base import Codec
from lab.codec.kernels import Peers
from lab.codec.layout import MessageLayout
from lab.codec.trial import require_sound
from lab.distributed.comm import Collective, Comm, NoWindow, Window
from lab.exchange.base import Exchange, RankOfSize, ResidualPart, Shapes, Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Needs, Sizes
from lab.exchange.memory import Memory
from lab.settings import checks

NOTABLE = 0.1  # share of all values: sent as float32, they are most of what one bit each leaves


P = TypeVar("P")  # what stays of a bucket's exchange from step to step; `bound` are its residuals


class Lossy(Staged):
    """An exchange that leaves something out of gradients, which a memory keeps for later steps.

    A subclass needs `stages`, in which it adds `residual` to a bucket and replaces it by what it
    leaves out.

    Attributes:
        warmup_steps: steps at first in which values travel as they are.
    """

    exact = False
    steady_from = 0
    warmup_steps = 0

    def __init__(self, memory: Memory) -> None:
        if not isinstance(cast(object, memory), Memory):
            kind = type(memory).__qualname__
            raise ValueError(f"memory={kind}: must be a subclass of lab.exchange.memory.Memory")
        self.memory, self.keeps_residuals = memory, memory.keeps

    def planned(self, bucket: GradBucket, comm: RankOfSize, make: Callable[..., P]) -> P:
        """Return what stays from step to step for `bucket`, made anew where residuals moved.

        Args:
            make: called with this exchange, `bucket` and `comm`.
        """
        made_for = comm.size, bucket.step >= self.warmup_steps
        found = bucket.plans.get(self)
        if found is None or found[0] != made_for or not self.is_current(found[1]):
            found = bucket.plans[self] = made_for, make(self, bucket, comm)
        return found[1]

    def residual(self, bucket: GradBucket, comm: RankOfSize) -> Tensor:
        """Return what is kept of a bucket, float32 [len(flat)], to be replaced in place."""
        own = self.planned(bucket, comm, _Residual).bound.own
        return torch.zeros_like(bucket.flat) if own is None else own

    def is_current(self, plan: Any) -> bool:
        """Return whether a plan still has what this exchange keeps."""
        return plan.bound.current

    def add_residual(self, bucket: GradBucket, comm: RankOfSize) -> None:
        self.memory.add_to(bucket)

    def flush_residual(self, bucket: GradBucket, comm: RankOfSize) -> None:
        self.memory.flush_to(bucket)
        bucket.plans.pop(self, None)

    def residuals(self, shapes: Shapes, comm: Comm) -> Iterator[ResidualPart]:
        return self.memory.residuals()

    def error_bound(self, largest: float, size: int) -> float:
        return 0.0 if self.keeps_residuals else math.inf

    def state_dict(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state)

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return self.memory.shares(states, size)


class _Residual:
    """The residuals of a bucket whose exchange has no messages of a codec."""

    def __init__(self, exchange: Lossy, bucket: GradBucket, comm: RankOfSize) -> None:
        self.bound = exchange.memory.bind(bucket, [(0, len(bucket.flat))])


class Messages:
    """Where a bucket's values lie in messages, and memory for these, kept from step to step.

    Attributes:
        message: uint8 [bytes], of this rank's gradients; lines end in zeros. `lines` and `line` are
            the same as [parts, bytes of a line] and [1, bytes].
        received: uint8 [ranks, bytes of a line], other ranks' messages.
        coded: first and end of the ranges of values that are encoded, in their order.
        finite: bool [], receives whether all values are.
    """

    def __init__(
        self,
        codec: Codec,
        layout: MessageLayout,
        comm: RankOfSize,
        like: Tensor,
        message: Tensor | None = None,
    ) -> None:
        if message is None:
            message = like.new_zeros(layout.num_bytes, dtype=torch.uint8)
        self.layout, self.kernels, self.size = layout, codec.kernels(like.device), comm.size
        self.message = message
        self.lines = self.message.view(layout.parts, layout.line_bytes)
        self.line = self.message.view(1, layout.num_bytes)
        self.coded = sorted((p.start, p.stop) for p in layout.pieces)
        self.finite = torch.ones((), dtype=torch.bool, device=like.device)

    @cached_property
    def received(self) -> Tensor:
        return self.message.new_empty(self.size, self.layout.line_bytes)


class Coded(Lossy):
    """A mean of gradients that travel as messages of a codec."""

    def __init__(self, codec: Codec, memory: Memory) -> None:
        super().__init__(memory)
        require_sound(codec, self.keeps_residuals)
        self.codec = codec

    def layout(self, bucket: GradBucket, parts: int) -> MessageLayout:
        """Lay out the messages of `bucket`, of `parts` lines; once for as many."""
        is_coded = bucket.step >= self.warmup_steps
        key = "layout", id(self.codec), parts, is_coded
        if key not in bucket.plans:
            shapes = bucket.shapes if is_coded else {}
            bucket.plans[key] = self.codec.layout(shapes, len(bucket.flat), parts)
        return bucket.plans[key]


class TwoStagePlan(Messages):
    """The same for a rank that sums one part of the bucket.

    Attributes:
        own: the layout of this part.
        reply: uint8 [bytes of a line], its sum.
        sums: uint8 [ranks, bytes of a line], the sums of all parts.
    """

    def __init__(
        self, exchange: Coded, bucket: GradBucket, comm: RankOfSize, message: Tensor | None = None
    ) -> None:
        layout = exchange.layout(bucket, comm.size)
        super().__init__(exchange.codec, layout, comm, bucket.flat, message)
        self.own, self.sums = self.layout.part(comm.rank), self.lines
        low = comm.rank * self.layout.line_bytes
        high = low + self.layout.line_bytes
        pieces = [p for p in self.layout.pieces if low <= p.payload < high]
        owned = [
            (piece.start, own.start, piece.stop - piece.start)
            for piece, own in zip(pieces, self.own.pieces, strict=True)
        ]
        self.bound = exchange.memory.bind(bucket, self.coded, owned, self.own.num_values)

    @cached_property
    def reply(self) -> Tensor:
        return self.message.new_zeros(self.layout.line_bytes)


class TwoStage(Coded):
    """Sums in two stages (Seide et al. 2014, section 3), each of which encodes.

    1. Each rank encodes its gradients and keeps what that leaves out. Part r of every rank's
       message goes to rank r.
    2. Rank r decodes these parts, its own too, adds them in rank order and encodes the sum, of
       which it keeps what that leaves out. Every rank receives all sums, decodes them and divides
       by N.

    So a rank sends 2(N-1)/N messages, whatever N is. A row with a value that is not finite is read
    as such by all ranks, which mark the bucket. Two levels send the sums to the other ranks of a
    node in place of what they say.
    """

    def __init__(self, codec: Codec, memory: Memory) -> None:
        super().__init__(codec, memory)
        memory.of_sums = True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count residuals, and messages: sent, later all sums; received; and of the own sum."""
        part, residuals = 1 / sizes.N, 4.0 * self.memory.keeps
        per_value = residuals * (1 + part) + self.codec.bytes_per_value() * (2 + part)
        return Needs(kept=sizes.n * per_value)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        plan = self.plan(bucket, comm)
        yield from self.sums(plan, bucket.flat, comm, plan.sums)
        plan.kernels.add_up(
            plan.layout, plan.sums.view_as(plan.line), bucket.flat, comm.size, plan.finite
        )
        bucket.finite = plan.finite

    def sum(self, bucket: GradBucket, comm: Comm, message: Tensor) -> Iterator[Collective]:
        """Fill `message`, uint8 [bytes of the layout], with all sums; yield as `stages`."""
        plan = self.plan(bucket, comm)
        return self.sums(plan, bucket.flat, comm, message.view_as(plan.lines))

    def plan(self, bucket: GradBucket, comm: Comm) -> TwoStagePlan:
        """Return what stays from step to step for `bucket`."""
        return self.planned(bucket, comm, TwoStagePlan)

    def sums(
        self, plan: TwoStagePlan, flat: Tensor, comm: Comm, sums: Tensor
    ) -> Iterator[Collective]:
        """Fill `sums`, uint8 [ranks, line]; it may be the memory of what was sent."""
        plan.kernels.encode(plan.layout, flat, plan.bound.own, plan.message, plan.finite)
        yield comm.iall_to_all(plan.received, plan.lines)
        plan.kernels.reduce(plan.own, plan.received, plan.bound.owned, plan.reply)
        yield comm.iall_gather(sums, plan.reply)

    def decode(self, message: Tensor, bucket: GradBucket, size: int, divisor: int) -> None:
        """Replace `bucket.flat` by what `message` of `size` ranks says, divided by `divisor`."""
        bucket.finite = torch.ones((), dtype=torch.bool, device=message.device)
        kernels, layout = self.codec.kernels(message.device), self.layout(bucket, size)
        kernels.add_up(layout, message.view(1, -1), bucket.flat, divisor, bucket.finite)


class _SymmetricPlan(TwoStagePlan):
    """Two stages in a window, of which each rank has a row: its message, and then all sums.

    Attributes:
        theirs: this rank's part of all messages, in rank order.
        replies: its place among the sums of all ranks, its own first.
    """

    def __init__(self, exchange: Coded, bucket: GradBucket, comm: Comm, window: Window) -> None:
        rank, (layout, rows) = comm.rank, (exchange.layout(bucket, comm.size), window.rows)
        own, line = rows[rank], layout.line_bytes
        super().__init__(exchange, bucket, comm, own[: layout.num_bytes])
        self.window, self.sums = window, own[layout.num_bytes :].view_as(self.lines)
        mine = slice(rank * line, (rank + 1) * line)
        near = isinstance(rows, Tensor)  # evenly spaced
        self.theirs = rows[:, mine] if near else Peers(row[mine] for row in rows)
        others = [rows[other] for other in range(comm.size) if other != rank]
        self.replies = Peers(row[layout.num_bytes :][mine] for row in (own, *others))


class Symmetric(TwoStage):
    """Two stages as TwoStage's, with the same bits, among ranks of one node, without messages.

    Each rank encodes its gradients into memory of its own that others read. When all have, rank r
    reads part r of every rank, adds in rank order, and writes the encoded sum to every rank's
    memory; when all have, each decodes what is there. So there are two meetings of the ranks and no
    call of a library that moves bytes: PyTorch's SymmetricMemory on GPUs, a file in memory on CPUs.
    (PyTorch's own one-shot and two-shot all-reduce do so with uncompressed values.)

    No third meeting is needed. Others read a message before the second one, so that its owner may
    write the next one after it. They write sums after the first one of a step, by which all have
    decoded the sums of the step before.

    Where ranks share no memory this is TwoStage; one line says why, and the record's `choices`.
    """

    def __init__(self, codec: Codec, memory: Memory) -> None:
        super().__init__(codec, memory)
        self._in_window: dict[str, bool] = {}  # by parameter, of its last bucket
        self._why: str | None = None  # ranks share no memory; from then on none is asked for

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count residuals, and the window: this rank's message, and all sums."""
        residuals = 4.0 * self.memory.keeps * (1 + 1 / sizes.N)
        return Needs(kept=sizes.n * (residuals + 2 * self.codec.bytes_per_value()))

    def choices(self) -> list[dict[str, Any]]:
        """Return which way parameters took, as far as any was exchanged, and how many."""
        within = sum(self._in_window.values())
        without = len(self._in_window) - within
        ways = [
            {"path": "symmetric", "parameters": within},
            {"path": "two_stage", "parameters": without, "why": self._why},
        ]
        return [way for way in ways if way["parameters"]]

    def plan(self, bucket: GradBucket, comm: Comm) -> TwoStagePlan:
        window = self._window_of(bucket, comm)
        if window is None:
            return super().plan(bucket, comm)
        return self.planned(bucket, comm, partial(_SymmetricPlan, window=window))

    def sums(
        self, plan: TwoStagePlan, flat: Tensor, comm: Comm, sums: Tensor
    ) -> Iterator[Collective]:
        if not isinstance(plan, _SymmetricPlan):
            yield from super().sums(plan, flat, comm, sums)
            return
        line_bytes = plan.layout.line_bytes
        plan.kernels.encode(plan.layout, flat, plan.bound.own, plan.message, plan.finite)
        yield comm.imeet(plan.window, line_bytes, last=False)
        plan.kernels.reduce(plan.own, plan.theirs, plan.bound.owned, plan.replies)
        yield comm.imeet(plan.window, line_bytes, last=True)
        if sums is not plan.sums:
            sums.copy_(plan.sums)

    def _window_of(self, bucket: GradBucket, comm: Comm) -> Window | None:
        """Return the window of a bucket, made at its first exchange; None: there is none."""
        num_bytes = 2 * self.layout(bucket, comm.size).num_bytes
        key = self, "window", comm.size, num_bytes
        if key in bucket.plans:
            return bucket.plans[key]
        window: Window | None = None
        if self._why is None:
            try:
                window = comm.window(num_bytes, bucket.flat.device)
            except NoWindow as error:
                self._why = str(error)
                text = (
                    f"path=symmetric: ranks share no memory ({error}); path=two_stage runs instead"
                )
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    warnings.warn_explicit(text, UserWarning, __name__, 0)  # shows no source line
        self._in_window.update(dict.fromkeys(bucket.shapes, window is not None))
        bucket.plans[key] = window
        return window


class _AllGatherPlan(Messages):
    def __init__(self, exchange: Coded, bucket: GradBucket, comm: RankOfSize) -> None:
        super().__init__(exchange.codec, exchange.layout(bucket, 1), comm, bucket.flat)
        self.bound = exchange.memory.bind(bucket, self.coded)


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
        plan.kernels.encode(plan.layout, bucket.flat, plan.bound.own, plan.message, plan.finite)
        yield comm.iall_gather(plan.received, plan.message)
        plan.kernels.add_up(plan.layout, plan.received, bucket.flat, comm.size, plan.finite)
        bucket.finite = plan.finite


class OneBit(TwoStage):
    """Two-stage 1-bit SGD with error feedback (Seide et al. 2014, section 3; CNTK's 1BitSGD).

    A rank sends n/4*(N-1)/N bytes, plus 8 bytes of scales for each row at each stage.

    Args:
        threshold, granularity, block_size, min_columns: see lab.codec.codecs.OneBit.
        warmup_steps: steps in full precision before quantisation starts.
        error_feedback: False drops both quantisation errors, to show what that costs.
    """

    def __init__(
        self,
        threshold: str = "zero",
        granularity: str = "column",
        block_size: int = 1024,
        min_columns: int = 64,
        warmup_steps: int = 0,
        error_feedback: bool = True,
    ) -> None:
        self._rows = codecs.OneBit(threshold, granularity, block_size, min_columns)
        super().__init__(self._rows, Memory(error_feedback))
        self.warmup_steps = checks.integer("exchange.warmup_steps", warmup_steps, 0)
        self.steady_from = self.warmup_steps

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        num_values = sum(map(math.prod, shapes.values()))
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            steps = f"all steps of the run ({self.total_steps})"
            yield num_values, f"{steps} are within {key}.warmup_steps={self.warmup_steps}"
            return
        coded = sum(rows.stop - rows.start for rows in self.codec.rows(shapes))
        which = f"vectors, and rows shorter than {key}.min_columns={self._rows.min_columns}"
        if self._rows.granularity == "block":
            which = f"values that do not fill a block of {key}.block_size={self._rows.block_size}"
        yield num_values - coded, which


class Int8(TwoStage):
    """Two-stage 8-bit averaging (ByteGrad of Bagua: Gan et al., VLDB 2022).

    A rank sends 2(N-1)/N bytes per value, plus 8 per block at each stage. There is no error
    feedback, as ByteGrad has none: a delivered value is off by at most half a level of its block in
    the mean, plus the mean of half a level in each rank's gradient.

    Args:
        block_size: values that share a smallest and a largest one, a multiple of 4; they may belong
            to several parameters.
    """

    def __init__(self, block_size: int = 1024) -> None:
        super().__init__(codecs.Int8(block_size), Memory(keeps=False))

    def error_bound(self, largest: float, size: int) -> float:
        steps = codecs.Int8.num_levels - 1
        half = largest / steps  # of a level, where values fill [-largest, largest]
        return half + half * (1 + 1 / steps)


class Int4(TwoStage):
    """Two-stage averaging as Int8's, in half the bits, with error feedback (Seide et al. 2014).

    Sixteen levels are few, so the rounding errors of both stages are carried over. A rank sends
    (N-1)/N bytes per value, plus 8 per block at each stage.

    Args:
        block_size: as Int8's, a multiple of 8.
        error_feedback: False drops the rounding errors, to show what that costs.
    """

    def __init__(self, block_size: int = 128, error_feedback: bool = True) -> None:
        super().__init__(codecs.Int4(block_size), Memory(error_feedback))


class SignSGD(AllGather):
    """Scaled sign with error feedback (Karimireddy et al. 2019, Algorithm 1), layer by layer.

    With p = gradient + residual of one tensor of d values, a rank sends sign(p) and |p|_1 / d and
    keeps p - |p|_1 / d * sign(p). Every rank receives all bits, adds them in rank order and divides
    by N, so it sends (N-1)(d/8 + 4) bytes for a tensor: cheap for few ranks only.

    Args:
        min_values: smaller tensors travel exactly.
        error_feedback: see Memory.
    """

    def __init__(self, min_values: int = 4096, error_feedback: bool = True) -> None:
        super().__init__(codecs.Signs(min_values), Memory(error_feedback))
        self.min_values = min_values

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        small = [size for s in shapes.values() if (size := math.prod(s)) < self.min_values]
        yield sum(small), f"tensors with fewer values than {key}.min_values={self.min_values}"


class TopK(AllGather):
    """The k values of largest magnitude, with error feedback (Stich et al. 2018, Algorithm 1).

    This is Deep Gradient Compression (Lin et al. 2018) without momentum correction and warm-up.
    Ranks choose different values, so every rank receives all of them: it sends 8k(N-1) bytes, an
    int32 index and a float32 value each, and adds in rank order.

    Args:
        ratio: k is this share of the values of each parameter, rounded up.
        error_feedback: see Memory.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        super().__init__(codecs.TopK(ratio), Memory(error_feedback))


def left_exact(exchange: Exchange, shapes: Shapes) -> list[str]:
    """Say which values an exchange's codecs leave as they are, a line each, where they are many.

    Args:
        shapes: of the parameters that are exchanged, by name.
    """
    total = sum(map(math.prod, shapes.values()))
    return [
        f"{100 * number / total:.0f} % of the values are sent as float32 ({number:,} of "
        f"{total:,}): {which}"
        for number, which in exchange.left_exact(shapes)
        if number >= NOTABLE * max(1, total)
    ]
