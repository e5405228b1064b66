"""1-bit Adam: Adam's momentum in one bit per value, once its variance has settled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.codec.onebit.message import Matrix
from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.exchange import blocks
from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.direction import (
    Adam,
    Direction,
    Moments,
    copies,
    is_finite,
    require_integer,
    zeros,
)
from lab.exchange.error_feedback import shares
from lab.exchange.frozen import freeze, scaled
from lab.exchange.settling import Settling
from lab.exchange.two_stage import TwoStageSum

# Kinds of state by parameter. Those of a shard go to its new owner on another number of ranks.
SHARED = ("momentum", "residual")
SHARDED = ("ratio", "shard_residual")
EQUAL = ("variance", "scales", "active", "late")


@dataclass
class Part:
    """A parameter in a bucket whose variance is frozen.

    Attributes:
        flat: float32 [rows, columns], its place in the bucket.
        active: float32 [active rows, columns], its active rows: `flat` itself, or a copy.
        matrices: blocks of the active values.
    """

    name: str
    flat: Tensor
    active: Tensor
    matrices: list[Matrix]

    def put_back(self, keep: Tensor) -> None:
        """Write active rows to their place in the bucket, and zeros to the others."""
        if self.active is not self.flat:
            self.flat.zero_()
            self.flat[keep] = self.active


class OneBitAdam(Staged, Direction):
    """1-bit Adam (Tang et al. 2021, algorithm 1), whose ranks keep momentum and variance in shares.

    At first gradients are averaged exactly, and the direction is AdamW's. Once the variance has
    settled (see Settling) it is frozen, and what travels is momentum:

    1. Each rank adds its share of the gradient to its own momentum, divides by a factored root of
       the variance (see Frozen), adds its residual and sends signs to the owners of the shards.
    2. An owner sums the shares, corrects them to the variance itself, of which it has its shard,
       adds the shard residual and sends signs of the *update* to all ranks.

    Tang et al. quantise the momentum that all ranks share, so that its errors pass through the
    momentum's own recursion, and every rank divides by all of the variance. Here momentum is exact,
    errors do not: delivered + residuals = true sums of Adam's directions at any time. A rank
    keeps 8 + 8/N bytes for a value: momentum and residual, and its shards of variance and residual.

    Signs cannot say zero. Rows that had no gradient before freezing (unused tokens, positions
    beyond the sequence) are not sent, and not changed. A row whose first gradient comes later has
    no variance to be divided by, so it stays as it is too; `choices` counts such rows.

    Args:
        betas, eps: see Adam.
        block_size: values that share the two magnitudes of their signs.
        settle_every, settle_below: see Settling.
        least_steps: steps before which nothing is frozen, counted from the end of `rate_warmup`.
        rate_warmup: steps in which the learning rate grows.
        freeze_at: steps after which to freeze, whatever the variance does; None: once it settles.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        block_size: int = 256,
        settle_every: int = 20,
        settle_below: float = 0.08,
        least_steps: int = 80,
        rate_warmup: int = 0,
        freeze_at: int | None = None,
    ) -> None:
        super().__init__()
        self.adam = Adam(tuple(betas), eps)
        require_integer("block_size", block_size, 8)
        require_integer("least_steps", least_steps, 1)
        require_integer("rate_warmup", rate_warmup, 0)
        if freeze_at is not None:
            require_integer("freeze_at", freeze_at, 1)
        self.block_size, self.freeze_at = block_size, freeze_at
        self.settling = Settling(settle_every, settle_below, least_steps + rate_warmup)
        self.frozen_at = 0  # steps before the variance was frozen; 0: it is not
        # Momentum and residual: this rank's share, of active values once frozen.
        self.moments: dict[str, Moments] = {kind: {} for kind in (*SHARED, *SHARDED, *EQUAL)}
        self._rows: Moments = {}  # indices of active rows

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        if self.begin(bucket, comm) and not self.frozen_at and self._settled():
            self.frozen_at = self.updates - 1
        yield from self._compressed(bucket, comm) if self.frozen_at else self._exact(bucket, comm)

    def _settled(self) -> bool:
        if self.freeze_at is not None:
            return self.updates > self.freeze_at
        return self.settling.settled(self.updates)

    def _exact(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield comm.iall_reduce(bucket.flat)
        bucket.finite = is_finite(bucket.flat)
        correction = self.adam.correction(1, self.updates)
        for name, start, stop in bucket.spans():
            gradient = bucket.flat[start:stop]
            momentum = zeros(self.moments["momentum"], name, gradient)
            variance = zeros(self.moments["variance"], name, gradient)
            self.adam.add(gradient, momentum, variance)
            if self.freeze_at is None:
                self.settling.look(name, variance, correction, self.updates)
            self.adam.direction(momentum, variance, self.updates, out=gradient)

    def _compressed(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        parts = [self._part(bucket, comm, *span) for span in bucket.spans()]
        factor = 1 / self.adam.correction(0, self.updates)
        for part in parts:
            momentum = self.moments["momentum"][part.name].view_as(part.active)
            momentum.lerp_(part.active, 1 - self.adam.betas[0])
            scaled(momentum, self.moments["scales"][part.name], factor, out=part.active)
        matrices = [matrix for part in parts for matrix in part.matrices]
        values = [m.view(part.active.view(-1)) for part in parts for m in part.matrices]
        residuals = [m.view(self.moments["residual"][m.name]) for m in matrices]
        ratios, shard_residuals = (self._of_shard(kind, parts, comm) for kind in SHARDED)

        def correct(sums: list[Tensor]) -> None:
            torch._foreach_mul_(sums, ratios)

        total = TwoStageSum(matrices, comm, bucket.flat, bucket.buffers)
        sums = total.message("gathered", comm.size)
        yield from total.stages(values, residuals, shard_residuals, sums, between=correct)
        bucket.finite = sums.deliver(values)
        for part in parts:
            part.put_back(self._keep(part.name))

    def _part(self, bucket: GradBucket, comm: Comm, name: str, start: int, stop: int) -> Part:
        """Return a parameter's gradient, frozen, with the rows that are sent."""
        if name not in self.moments["ratio"]:
            self._freeze(name, bucket.shapes[name], comm)
        active = self.moments["active"][name]
        flat = bucket.flat[start:stop].view(len(active), -1)
        keep = self._keep(name)
        if len(keep) < len(active):
            late = self.moments["late"]
            late[name] = late[name] | ((flat != 0).any(dim=1) & ~active)
            chosen = flat[keep]
        else:
            chosen = flat
        return Part(name, flat, chosen, self._blocks(name))

    def _freeze(self, name: str, shape: torch.Size, comm: Comm) -> None:
        self.settling.sample.pop(name, None)
        variance = self.moments["variance"].pop(name).div_(self.adam.correction(1, self.frozen_at))
        frozen = freeze(variance, shape, self.adam.eps)
        self.moments["active"][name], self.moments["scales"][name] = frozen.active, frozen.scales
        self.moments["late"][name] = torch.zeros_like(frozen.active)
        momentum = self.moments["momentum"].pop(name).div_(comm.size)
        if len(frozen.ratio) < len(momentum):
            momentum = momentum.view(len(frozen.active), -1)[self._keep(name)].flatten()
        self.moments["momentum"][name] = momentum
        ratio = blocks.shard_of(frozen.ratio, self._blocks(name), comm.rank, comm.size)
        del variance, frozen
        self.moments["ratio"][name] = ratio
        self.moments["residual"][name] = torch.zeros_like(momentum)
        self.moments["shard_residual"][name] = torch.zeros_like(ratio)

    def _keep(self, name: str) -> Tensor:
        """Return the indices of a parameter's active rows."""
        if name not in self._rows:  # the host waits, once for a parameter
            self._rows[name] = self.moments["active"][name].nonzero().view(-1)
        return self._rows[name]

    def _blocks(self, name: str) -> list[Matrix]:
        return blocks.blocks(name, self.moments["momentum"][name].numel(), self.block_size)

    def _of_shard(self, kind: str, parts: list[Part], comm: Comm) -> list[Tensor]:
        """Return this rank's rows of what is kept in shards, for each matrix of `parts`."""
        where = comm.rank, comm.size
        each = [
            blocks.views_of_shard(self.moments[kind][p.name], p.matrices, *where) for p in parts
        ]
        return [rows for views in each for rows in views]

    def choices(self) -> list[dict[str, Any]]:
        """Return after how many steps the variance was frozen, and the rows that are not sent."""
        silent = sum(int((~rows).sum()) for rows in self.moments["active"].values())
        late = sum(int(rows.sum()) for rows in self.moments["late"].values())
        frozen = {"frozen_at": self.frozen_at or None, "ratio": self.settling.ratio}
        return [{**frozen, "silent_rows": silent, "late_rows": late}]

    def state_dict(self) -> dict[str, Any]:
        kinds = {kind: dict(kept) for kind, kept in self.moments.items()}
        state = {**super().state_dict(), **self.settling.state_dict(), **kinds}
        state["counts"]["frozen_at"] = torch.tensor(self.frozen_at)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.settling.load_state_dict(state)
        self.frozen_at = int(state["counts"]["frozen_at"])
        self.moments = {kind: copies(state[kind]) for kind in self.moments}
        self._rows = {}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Give each rank an equal share of momentum and residuals, and its shard of the others.

        Shares add up to Adam's momentum on any number of ranks, so it stays as it was.
        """
        new = super().redistribute(states, rank, size)
        new["settling"] = dict(states[0]["settling"])
        new |= {kind: dict(states[0][kind]) for kind in EQUAL}
        for kind in SHARED:
            frozen = bool(states[0]["ratio"])
            new[kind] = shares([s[kind] for s in states], size) if frozen else states[0][kind]
        for kind in SHARDED:
            new[kind] = {}
            for name in states[0][kind]:
                parts = blocks.blocks(name, states[0]["momentum"][name].numel(), self.block_size)
                whole = blocks.joined([state[kind][name] for state in states], parts)
                new[kind][name] = blocks.shard_of(whole, parts, rank, size)
        return new
