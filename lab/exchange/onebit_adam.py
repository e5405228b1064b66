"""1-bit Adam: Adam's momentum in one bit per value, once its variance has settled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.distributed.comm import Collective, Comm
from lab.distributed.worker import HostCopy
from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.direction import Direction, Moments, is_finite
from lab.exchange.frozen import divide, freeze, scaled
from lab.exchange.memory import shares
from lab.exchange.signed_rows import Part, SignedRows
from lab.settings import checks

SIGNS_OF = ("momentum", "gradient")
SAMPLED = 16  # every 16th value is compared: the norms hardly differ, and nor does memory


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

    With `signs_of="gradient"` the same travels of the gradient, and what is delivered updates one
    momentum, which all ranks share: directions are then as long as Adam's, where signs of momentum
    are longer, and sums of gradients over the root are the true ones.

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
        signs_of: "momentum" or "gradient".

    Raises:
        ValueError: an argument out of range.
    """

    kinds = ("momentum", "variance", "scales", "ratio")

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
        signs_of: str = "momentum",
    ) -> None:
        super().__init__(betas, eps)
        checks.whole("exchange.least_steps", least_steps, 1)
        checks.whole("exchange.rate_warmup", rate_warmup, 0)
        if freeze_at is not None:
            checks.whole("exchange.freeze_at", freeze_at, 1)
        self.of_momentum = checks.one_of("exchange.signs_of", signs_of, SIGNS_OF) == "momentum"
        self.freeze_at, self.signed = freeze_at, SignedRows(block_size)
        self.settling = Settling(settle_every, settle_below, least_steps + rate_warmup)
        self.frozen_at = 0  # steps before the variance was frozen; 0: it is not
        # Once frozen, ratio is of this rank's shard, and momentum this rank's share, of active
        # rows; or, of signs of gradients, all of it over the root.

    def add_cost(self, costs: Costs) -> bool:
        """Count the passes of a step with a frozen variance: momentum, signs, correction."""
        if self.of_momentum:
            return self.signed.add_cost(costs, before=12 + 16, of_shard=12, after=0)
        return self.signed.add_cost(costs, before=16, of_shard=12, after=12 + 8)

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count momentum, and the shard of variance, besides what signs need."""
        own = 4 * sizes.n * (1 + 1 / sizes.N)
        return Needs(kept=own + self.signed.memory_bytes(sizes).kept)

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
            momentum, variance = self.add_by_adam(name, gradient)
            if self.freeze_at is None:
                self.settling.look(name, variance, correction, self.updates)
            self.adam.direction(momentum, variance, self.updates, out=gradient)

    def _compressed(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        for name, shape in bucket.shapes.items():
            if name not in self.signed:
                self._freeze(name, shape, comm)
        parts = [self.signed.part(bucket, *span) for span in bucket.spans()]
        for part in parts:
            self._leave_what_travels(part)
        ratios = [self.moments["ratio"][part.name] for part in parts]

        def correct(sums: Tensor) -> None:
            torch._foreach_mul_(sums.split([len(ratio) for ratio in ratios]), ratios)

        yield from self.signed.stages(bucket, parts, comm, between=correct)
        if not self.of_momentum:
            self._follow(bucket)

    def _leave_what_travels(self, part: Part) -> None:
        """Turn a share of the gradient into what signs are taken of."""
        scales = self.moments["scales"][part.name]
        if not self.of_momentum:
            scaled(part.active, scales, 1.0, out=part.active)
            return
        momentum = self.moments["momentum"][part.name].view_as(part.active)
        momentum.lerp_(part.active, 1 - self.adam.betas[0])
        scaled(momentum, scales, 1 / self.adam.correction(0, self.updates), out=part.active)

    def _follow(self, bucket: GradBucket) -> None:
        """Add delivered gradients over the root to momentum, and leave it as the direction."""
        correction = self.adam.correction(0, self.updates)
        for name, start, stop in bucket.spans():
            mean, momentum = bucket.flat[start:stop], self.moments["momentum"][name]
            momentum.lerp_(mean, 1 - self.adam.betas[0])
            torch.div(momentum, correction, out=mean)

    def _freeze(self, name: str, shape: torch.Size, comm: Comm) -> None:
        self.settling.sample.pop(name, None)
        variance = self.moments["variance"].pop(name).div_(self.adam.correction(1, self.frozen_at))
        frozen = freeze(variance, shape, self.adam.eps)
        momentum = self.moments["momentum"].pop(name).view(len(frozen.active), -1)
        if not self.of_momentum:
            divide(momentum, frozen)
        elif len(frozen.ratio) < momentum.numel():
            momentum = momentum[frozen.active].div_(comm.size)
        else:
            momentum.div_(comm.size)
        self.moments["momentum"][name] = momentum.view(-1)
        self.moments["scales"][name] = frozen.scales
        self.moments["ratio"][name] = self.signed.shard_of(name, frozen.ratio, comm)
        del variance, frozen.ratio  # before there is memory for residuals
        self.signed.lay_out(name, frozen.active, momentum.shape[1], comm)

    def choices(self) -> list[dict[str, Any]]:
        """Return after how many steps the variance was frozen, and the rows that are not sent."""
        frozen = {"frozen_at": self.frozen_at or None, "ratio": self.settling.ratio}
        return [{**frozen, **self.signed.counts()}]

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), **self.settling.state_dict()}
        state["counts"]["frozen_at"] = torch.tensor(self.frozen_at)
        return state | self.signed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.settling.load_state_dict(state)
        self.signed.load_state_dict(state)
        self.frozen_at = int(state["counts"]["frozen_at"])

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Keep what all ranks share, and give each its part of the rest.

        Shares of momentum are equal, and add up to Adam's on any number of ranks.
        """
        new = super().redistribute(states, rank, size)
        new["settling"] = dict(states[0]["settling"])
        if self.of_momentum and states[0]["ratio"]:
            new["momentum"] = shares([state["momentum"] for state in states], size)
        new["ratio"] = self.signed.sharded_anew("ratio", states, rank, size)
        return new | self.signed.redistribute(states, rank, size)


class Settling:
    """Watches ‖v_t − v_{t−k}‖₁ / ‖v_t‖₁, of v corrected for its bias, every k steps.

    Tang et al. 2021 (section 7.1) freeze when the norm itself stops changing; the norm of the
    difference also sees values that change in opposite directions. All ranks have the same v, so
    all find the same. The sums travel to the host while the next step is queued, and are read in
    the step after it.

    Args:
        every: k.
        below: the variance has settled once the ratio is below it.
        least: steps before which it has not, whatever the ratio.

    Attributes:
        ratio: the last ratio read; None: there is none yet.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, every: int, below: float, least: int) -> None:
        checks.whole("exchange.settle_every", every, 2)
        checks.number("exchange.settle_below", below, above=0, below=1)
        self.every, self.below, self.least = every, below, least
        self.ratio: float | None = None
        self.sample: Moments = {}  # float32 [values / SAMPLED] of v, k steps ago
        self._sums: Tensor | None = None  # float32 [2]: of differences, and of v
        self._coming: HostCopy | None = None

    def look(self, name: str, variance: Tensor, correction: float, updates: int) -> None:
        """Compare parameter `name` with what it was k steps ago, if it is time.

        Args:
            variance: float32 [values].
            correction: the sum of the weights in it.
            updates: steps so far.
        """
        if updates % self.every:
            return
        now = variance[::SAMPLED] / correction
        before = self.sample.get(name)
        self.sample[name] = now
        difference = now if before is None else now - before
        sums = torch.stack([difference.abs().sum(), now.sum()])
        self._sums = sums if self._sums is None else self._sums + sums

    def settled(self, updates: int) -> bool:
        """Return whether the variance has settled. Called once a step, before it.

        Args:
            updates: steps so far, the one that begins included.
        """
        if updates % self.every == 1 and self._sums is not None:
            self._coming = HostCopy(self._sums)
        if updates % self.every != 2 % self.every or self._sums is None:
            return False
        sums = (self._coming or HostCopy(self._sums)).read()  # not coming: just resumed
        self._sums = self._coming = None
        difference, total = sums.tolist()
        self.ratio = difference / total if total else 0.0
        return self.ratio < self.below and updates > self.least

    def state_dict(self) -> dict[str, Any]:
        sums = {} if self._sums is None else {"sums": self._sums}
        return {"settling": {**sums, **{f"sample.{n}": v for n, v in self.sample.items()}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = {name: value.clone() for name, value in state["settling"].items()}
        self._sums, self._coming = kept.pop("sums", None), None
        self.sample = {name.removeprefix("sample."): value for name, value in kept.items()}
