"""0/1 Adam: Adam in one bit per value but for the steps that update its variance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.direction import Direction, is_finite
from lab.exchange.frozen import raise_least
from lab.exchange.layout import as_matrix
from lab.exchange.signed_rows import SignedRows
from lab.settings import checks


class ZeroOneAdam(Staged, Direction):
    """0/1 Adam (Lu et al. 2022, algorithm 1) without its local steps.

    1. In steps at intervals that double (see Doubling) gradients are averaged exactly, and update
       momentum and variance.
    2. In all others, from the start of the run on, each rank divides its share of the gradient by
       the root of the last variance, adds its residual and sends signs. The sum, times that root,
       updates momentum alone.

    All ranks have the same momentum and variance, so an exact step is one all-reduce. Delivered +
    residuals = true sums of gradients at any time. A rank keeps 16 + 4/N bytes for a value, and
    12 + 4/N once the variance is frozen: momentum, root, residual, its shard's residual, and until
    then the variance.

    Rows that had no gradient before an interval began are not sent until the next one begins (see
    SignedRows); until then only exact steps see theirs. Rows that never have one do not change.

    Args:
        betas, eps: see Adam.
        block_size: values that share the two magnitudes of their signs.
        updates_per_interval: updates of the variance before the interval doubles, kappa in the
            paper.
        longest_interval: steps, a power of two; after its updates the variance is frozen.

    Raises:
        ValueError: an argument out of range.
    """

    kinds = ("momentum", "variance", "root")

    def __init__(
        self,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        block_size: int = 256,
        updates_per_interval: int = 16,
        longest_interval: int = 16,
    ) -> None:
        super().__init__(betas, eps)
        self.signed = SignedRows(block_size)
        self.doubling = Doubling(updates_per_interval, longest_interval)

    def add_cost(self, costs: Costs) -> bool:
        """Count the passes of a step in signs, as all are once the variance is frozen."""
        return self.signed.add_cost(costs, before=12, of_shard=0, after=12 + 12 + 12 + 8)

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count momentum and root besides what signs need."""
        return Needs(kept=8 * sizes.n + self.signed.memory_bytes(sizes).kept)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        self.begin(bucket, comm)
        exact = self.doubling.is_due(self.updates)
        yield from self._exact(bucket, comm) if exact else self._compressed(bucket, comm)

    def _exact(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield comm.iall_reduce(bucket.flat)
        bucket.finite = is_finite(bucket.flat)
        for name, start, stop in bucket.spans():
            gradient = bucket.flat[start:stop]
            momentum, variance = self.add_by_adam(name, gradient)
            if self.doubling.interval(self.updates) == 1:
                self.adam.direction(momentum, variance, self.updates, out=gradient)
            else:  # momentum holds errors of signs, even of values without any variance
                root = self._root(name, bucket.shapes[name])
                torch.div(momentum, root.view(-1), out=gradient)
                gradient.div_(self.adam.correction(0, self.updates))

    def _compressed(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        if self.doubling.is_due(self.updates - 1):
            for name, shape in bucket.shapes.items():
                self._follow_variance(name, shape, comm)
        parts = [self.signed.part(bucket, *span) for span in bucket.spans()]
        for part in parts:
            part.active.div_(self._of_rows(part.name, part.flat.shape[1]))
        yield from self.signed.stages(bucket, parts, comm)
        correction = self.adam.correction(0, self.updates)
        for name, start, stop in bucket.spans():
            values, root = bucket.flat[start:stop], self.moments["root"][name]
            momentum = self.moments["momentum"][name]
            momentum.lerp_(values.mul_(root), 1 - self.adam.betas[0])
            torch.div(momentum, root, out=values).div_(correction)

    def _follow_variance(self, name: str, shape: torch.Size, comm: Comm) -> None:
        """Divide by the variance as the last step left it; residuals stay in units of gradients."""
        variance = self.moments["variance"][name].view(as_matrix(shape) or (-1, 1))
        active = (variance != 0).any(dim=1)
        before = self.moments["root"].pop(name, None)
        root = self._root(name, shape)
        columns = root.shape[1]
        self.moments["root"][name] = root.flatten()
        if before is not None:
            change = self._of_rows(name, columns, before.view_as(root).div_(root))
            self.signed.scale_residuals(name, change.flatten(), comm)
        if self.doubling.is_first(self.updates):
            self.signed.lay_out(name, active, columns, comm)

    def _root(self, name: str, shape: torch.Size) -> Tensor:
        """Return the root to divide by, float32 [rows, columns]; raise the variance to its square.

        So the root falls no faster than a variance without gradients, by 1 - beta2 at an update.
        Once the variance is frozen, the root takes its memory.
        """
        frozen = self.updates > self.doubling.last
        kept = self.moments["variance"]
        variance = (kept.pop(name) if frozen else kept[name]).view(as_matrix(shape) or (-1, 1))
        raise_least(variance)
        root = variance if frozen else variance.clone()
        root.div_(self.adam.correction(1, self.doubling.num_due(self.updates)))
        return root.sqrt_().add_(self.adam.eps)

    def _of_rows(self, name: str, columns: int, values: Tensor | None = None) -> Tensor:
        """Return the active rows of a parameter's values, by default of the root."""
        values = self.moments["root"][name].view(-1, columns) if values is None else values
        rows = self.signed.rows(name)
        return values if len(rows) == len(values) else values[rows]

    def choices(self) -> list[dict[str, Any]]:
        """Return after how many steps the variance was frozen, and the rows that are not sent."""
        updates = self.doubling.num_due(self.updates) if self.updates else 0
        frozen_at = self.doubling.last if self.updates > self.doubling.last else None
        counted = {"frozen_at": frozen_at, "variance_updates": updates}
        return [{**counted, **self.signed.counts()}]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.signed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.signed.load_state_dict(state)

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Keep the moments, which all ranks share, and give each rank its part of the residuals."""
        own = super().redistribute(states, rank, size)
        return own | self.signed.redistribute(states, rank, size)


class Doubling:
    """The steps in which 0/1 Adam updates its variance (Lu et al. 2022, section 6.1).

    `each` of them follow each other at once, `each` at every second step, `each` at every fourth,
    and so on up to every `longest`-th; then there are none any more. Steps count from 1.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, each: int, longest: int) -> None:
        checks.whole("exchange.updates_per_interval", each, 1)
        checks.whole("exchange.longest_interval", longest, 1)
        if longest & (longest - 1):
            raise ValueError(f"exchange.longest_interval={longest}: must be a power of two")
        self.each = each
        self.last = each * (2 * longest - 1)  # the last step that is due

    def interval(self, step: int) -> int:
        """Return the interval at which steps are due at `step`."""
        return 1 << (((min(step, self.last) - 1) // self.each + 1).bit_length() - 1)

    def is_due(self, step: int) -> bool:
        return step <= self.last and self._place(step) % self.interval(step) == 0

    def is_first(self, step: int) -> bool:
        """Return whether an interval of more than one step begins with `step`, or none is due."""
        begins = self._place(step) == 1 and self.interval(step) > 1
        return step == self.last + 1 or (step <= self.last and begins)

    def num_due(self, step: int) -> int:
        """Count the steps up to `step` that are due."""
        step = min(step, self.last)
        interval = self.interval(step)
        doublings = interval.bit_length() - 1
        return self.each * doublings + self._place(step) // interval

    def _place(self, step: int) -> int:
        """Return which step of its interval's steps `step` is, from 1."""
        return step - self.each * (self.interval(step) - 1)
