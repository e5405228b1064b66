"""Two stages of messages that no library carries: ranks of a node read each other's memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.kernels import Peers
from lab.distributed.comm import Collective, Comm, NoWindow, Window
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import Coded, TwoStage, TwoStagePlan
from lab.exchange.cost import Needs, Sizes
from lab.exchange.memory import Memory


class _Plan(TwoStagePlan):
    """The same for messages in a window, of which each rank has a row: its message, then all sums.

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
        return self.planned(bucket, comm, partial(_Plan, window=window))

    def sums(
        self, plan: TwoStagePlan, flat: Tensor, comm: Comm, sums: Tensor
    ) -> Iterator[Collective]:
        if not isinstance(plan, _Plan):
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
        num_bytes = 2 * self.message_bytes(bucket, comm.size)
        key = self, "window", comm.size, num_bytes
        if key not in bucket.plans:
            window = bucket.plans[key] = self._new_window(comm, num_bytes, bucket.flat.device)
            self._in_window.update(dict.fromkeys(bucket.shapes, window is not None))
        return bucket.plans[key]

    def _new_window(self, comm: Comm, num_bytes: int, device: torch.device) -> Window | None:
        if self._why is None:
            try:
                return comm.window(num_bytes, device)
            except NoWindow as error:
                self._why = str(error)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                text = (
                    f"path=symmetric: ranks share no memory ({self._why}); path=two_stage runs "
                    "instead"
                )
                warnings.warn_explicit(text, UserWarning, __name__, 0)  # shows no line of source
        return None
