"""1-bit Adam: gradients in one bit per value, once Adam's variance has settled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
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
from lab.exchange.frozen import freeze, scaled
from lab.exchange.settling import Settling
from lab.exchange.signed_rows import SignedRows

KINDS = ("momentum", "variance", "scales", "ratio")


class OneBitAdam(Direction):
    """1-bit Adam (Tang et al. 2021), which takes signs before momentum instead of after it.

    At first gradients are averaged exactly, and the direction is AdamW's. Once the variance has
    settled (see Settling) it is frozen, and Adam is linear in the gradient:

    1. Each rank divides its share of the gradient by a factored root of the variance (see Frozen),
       adds its residual and sends signs to the owners of the shards.
    2. An owner sums the shares, corrects them to the variance itself, of which it has its shard,
       adds the shard residual and sends signs to all ranks.
    3. What they deliver updates momentum, which all ranks share: it is the direction.

    Tang et al. (algorithm 1) take signs of momentum. A momentum changes slowly, so that errors of
    its signs have the same sign for many steps, and reach the weights as they are. Those of
    gradients alternate, and momentum averages them. Delivered + residuals = true sums of the
    gradients over the root of the variance at any time. A rank keeps 8 + 8/N bytes for a value:
    momentum and residual, and its shards of variance and residual.

    Rows that had no gradient before freezing are not sent, and not changed (see SignedRows). A row
    whose first gradient comes later has no variance to be divided by, so it stays as it is too;
    `choices` counts such rows.

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
        self.adam = Adam((betas[0], betas[1]), eps)
        require_integer("least_steps", least_steps, 1)
        require_integer("rate_warmup", rate_warmup, 0)
        if freeze_at is not None:
            require_integer("freeze_at", freeze_at, 1)
        self.freeze_at, self.signed = freeze_at, SignedRows(block_size)
        self.settling = Settling(settle_every, settle_below, least_steps + rate_warmup)
        self.frozen_at = 0  # steps before the variance was frozen; 0: it is not
        # Once frozen, momentum is of gradients over the root, and ratio of this rank's shard.
        self.moments: dict[str, Moments] = {kind: {} for kind in KINDS}

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
        for name, shape in bucket.shapes.items():
            if name not in self.signed:
                self._freeze(name, shape, comm)
        parts = [self.signed.part(bucket, *span) for span in bucket.spans()]
        for part in parts:
            scaled(part.active, self.moments["scales"][part.name], out=part.active)
        ratios = self.signed.views_of_shard(self.moments["ratio"], parts, comm)

        def correct(sums: list[Tensor]) -> None:
            torch._foreach_mul_(sums, ratios)

        yield from self.signed.stages(bucket, parts, comm, between=correct)
        correction = self.adam.correction(0, self.updates)
        for name, start, stop in bucket.spans():
            mean, momentum = bucket.flat[start:stop], self.moments["momentum"][name]
            momentum.lerp_(mean, 1 - self.adam.betas[0])
            torch.div(momentum, correction, out=mean)

    def _freeze(self, name: str, shape: torch.Size, comm: Comm) -> None:
        self.settling.sample.pop(name, None)
        variance = self.moments["variance"].pop(name).div_(self.adam.correction(1, self.frozen_at))
        self.moments["momentum"][name].div_(variance.sqrt().add_(self.adam.eps))
        frozen = freeze(variance, shape, self.adam.eps)
        columns = variance.numel() // len(frozen.active)
        self.signed.lay_out(name, frozen.active, columns, comm)
        self.moments["scales"][name] = frozen.scales
        self.moments["ratio"][name] = self.signed.shard_of(name, frozen.ratio, comm)

    def choices(self) -> list[dict[str, Any]]:
        """Return after how many steps the variance was frozen, and the rows that are not sent."""
        frozen = {"frozen_at": self.frozen_at or None, "ratio": self.settling.ratio}
        return [{**frozen, **self.signed.counts()}]

    def state_dict(self) -> dict[str, Any]:
        kinds = {kind: dict(kept) for kind, kept in self.moments.items()}
        state = {**super().state_dict(), **self.settling.state_dict(), **kinds}
        state["counts"]["frozen_at"] = torch.tensor(self.frozen_at)
        return state | self.signed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.settling.load_state_dict(state)
        self.signed.load_state_dict(state)
        self.frozen_at = int(state["counts"]["frozen_at"])
        self.moments = {kind: copies(state[kind]) for kind in KINDS}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Keep the moments that all ranks share, and give each its part of the others."""
        new = super().redistribute(states, rank, size)
        new["settling"] = dict(states[0]["settling"])
        new |= {kind: dict(states[0][kind]) for kind in ("momentum", "variance", "scales")}
        new["ratio"] = self.signed.sharded_anew("ratio", states, rank, size)
        return new | self.signed.redistribute(states, rank, size)
