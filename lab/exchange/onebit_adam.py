"""Adam in one bit per value: 1-bit Adam, 1-bit LAMB, and 0/1 Adam."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lab.distributed.comm import Collective, Comm
from lab.distributed.worker import HostCopy
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.direction import Moments
from lab.exchange.layout import as_matrix, named
from lab.exchange.memory import shares
from lab.exchange.signed_rows import (
    KINDS,
    LARGEST,
    ActiveRows,
    SignedDirection,
    factors,
    raise_least,
    scale,
)
from lab.settings import checks
from lab.settings.checks import is_number

SIGNS_OF = ("momentum", "gradient")
SAMPLED = 16  # every 16th value is compared: the norms hardly differ, and nor does memory
MEMORY = 20  # steps over which the power of delivered directions is averaged


class OneBitAdam(SignedDirection):
    """1-bit Adam (Tang et al. 2021, algorithm 1), whose ranks keep momentum and variance in shares.

    At first gradients are averaged exactly, and the direction is AdamW's. Once the variance has
    settled (see FreezeCriterion) it is frozen, and what travels is momentum:

    1. Each rank adds its share of the gradient to its own momentum, divides by a factored root of
       the variance, adds its residual and sends signs to the owners of the shards.
    2. An owner sums the shares, corrects them to the variance itself, of which it has its shard,
       adds the shard residual and sends signs of the *update* to all ranks.

    Tang et al. quantise the momentum that all ranks share, so that its errors pass through the
    momentum's own recursion, and every rank divides by all of the variance. Here momentum is exact,
    errors do not: delivered + residuals = true sums of Adam's directions at any time. A rank
    keeps 8 + 8/N bytes for a value: momentum and residual, and its shards of variance and residual.

    With `signs_of="gradient"` the same travels of the gradient, and what is delivered updates one
    momentum, which all ranks share: directions are then as long as Adam's, where signs of momentum
    are longer, and sums of gradients over the root are the true ones.

    Rows that had no gradient before freezing are not sent, and not changed (see SignedDirection). A
    row whose first gradient comes later has no variance to be divided by, so it stays as it is too;
    `choices` counts such rows.

    Args:
        betas, eps: see Adam.
        block_size: values that share the two magnitudes of their signs.
        settle_every, settle_below: see FreezeCriterion.
        least_steps: steps before which nothing is frozen, counted from the end of `rate_warmup`.
        rate_warmup: steps in which the learning rate grows.
        freeze_at: steps after which to freeze, whatever the variance does; None: once it settles.
        signs_of: "momentum" or "gradient".
    """

    # Once frozen, ratio is of this rank's shard, and momentum this rank's share, of active rows;
    # or, of signs of gradients, all of it over the root. scales are the root's factors.
    kinds = ("momentum", "variance", "scales", "ratio", *KINDS)

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
        super().__init__(betas, eps, block_size)
        checks.integer("exchange.least_steps", least_steps, 1)
        checks.integer("exchange.rate_warmup", rate_warmup, 0)
        if freeze_at is not None:
            checks.integer("exchange.freeze_at", freeze_at, 1)
        self.of_momentum = checks.one_of("exchange.signs_of", signs_of, SIGNS_OF) == "momentum"
        self.freeze_at = freeze_at
        self.criterion = FreezeCriterion(settle_every, settle_below, least_steps + rate_warmup)
        self.frozen_at = 0  # steps before the variance was frozen; 0: it is not

    def add_cost(self, costs: Costs) -> bool:
        """Count the passes of a step with a frozen variance: momentum, signs, correction."""
        if self.of_momentum:
            return self.add_signs(costs, before=12 + 16, of_shard=12, after=0)
        return self.add_signs(costs, before=16, of_shard=12, after=12 + 8)

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count momentum, and the shard of variance, besides what signs need."""
        own = 4 * sizes.n * (1 + 1 / sizes.N)
        return Needs(kept=own + super().memory_bytes(sizes).kept)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        if self.begin(bucket, comm) and not self.frozen_at:
            if self.freeze_at is None:
                freezes = self.criterion.is_met(self.updates)
            else:
                freezes = self.updates > self.freeze_at
            self.frozen_at = self.updates - 1 if freezes else 0
        average = self._compressed if self.frozen_at else self.average_exactly
        yield from average(bucket, comm)

    def direct_exactly(
        self, name: str, shape: torch.Size, momentum: Tensor, variance: Tensor, out: Tensor
    ) -> None:
        if self.freeze_at is None:
            correction = self.adam.correction(1, self.updates)
            self.criterion.observe(name, variance, correction, self.updates)
        self.adam.direction(momentum, variance, self.updates, out=out)

    def _compressed(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        for name, shape in bucket.shapes.items():
            if name not in self.moments["active"]:
                self._freeze(name, shape, comm)
        parts = self.parts(bucket)
        for part in parts:
            self._leave_what_travels(part)
        ratios = [self.moments["ratio"][part.name] for part in parts]

        def correct(sums: Tensor) -> None:
            torch._foreach_mul_(sums.split([len(ratio) for ratio in ratios]), ratios)

        yield from self.sum_signs(bucket, parts, comm, between=correct)
        if self.of_momentum:
            return
        correction = self.adam.correction(0, self.updates)
        for name, start, stop in bucket.spans():  # delivered are gradients over the root
            mean, momentum = bucket.flat[start:stop], self.moments["momentum"][name]
            momentum.lerp_(mean, 1 - self.adam.betas[0])
            torch.div(momentum, correction, out=mean)

    def _leave_what_travels(self, part: ActiveRows) -> None:
        """Turn a share of the gradient into what signs are taken of."""
        scales = self.moments["scales"][part.name]
        if not self.of_momentum:
            scale(part.active, scales, 1.0, out=part.active)
            return
        momentum = self.moments["momentum"][part.name].view_as(part.active)
        momentum.lerp_(part.active, 1 - self.adam.betas[0])
        scale(momentum, scales, 1 / self.adam.correction(0, self.updates), out=part.active)

    def _freeze(self, name: str, shape: torch.Size, comm: Comm) -> None:
        """Freeze a variance, without the rows that had no gradient.

        Every rank divides by its factored root before it takes signs, since values that share one
        magnitude should be of one size. The owner of a row corrects the sum to the true root, by
        `ratio`: the factored root over (root of v + eps). The host waits to know which rows are
        active, once for a parameter.
        """
        self.criterion.sample.pop(name, None)
        rows, columns = as_matrix(shape) or (shape.numel(), 1)
        v = self.moments["variance"].pop(name).div_(self.adam.correction(1, self.frozen_at))
        v = v.view(rows, columns)
        active = (v != 0).any(dim=1)
        if not (every := bool(active.all())):
            v = v[active]
        of_row, of_column = factors(v)
        true = v.sqrt_().add_(self.adam.eps).mul_(of_row[:, None]).mul_(of_column)
        ratio = true.clamp_(min=1 / LARGEST).reciprocal_().flatten()
        scales = torch.cat([of_row, of_column])
        momentum = self.moments["momentum"].pop(name).view(rows, columns)
        own = momentum if every else momentum[active]
        if self.of_momentum:
            momentum = own.div_(comm.size)
        else:
            scale(own, scales, 1.0, out=own)
            own.mul_(ratio.view_as(own))
            if not every:
                momentum[active] = own
        self.moments["momentum"][name] = momentum.view(-1)
        self.moments["scales"][name] = scales
        self.moments["ratio"][name] = self.shard_of(ratio, comm)
        del v, true, ratio  # before there is memory for residuals
        self.lay_out(name, active, columns, comm)

    def choices(self) -> list[dict[str, Any]]:
        """Return after how many steps the variance was frozen, and the rows that are not sent."""
        frozen = {"frozen_at": self.frozen_at or None, "ratio": self.criterion.ratio}
        return [{**frozen, **self.row_counts()}]

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "settling": self.criterion.state()}
        state["counts"]["frozen_at"] = torch.tensor(self.frozen_at)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.criterion.load(state["settling"])
        self.frozen_at = int(state["counts"]["frozen_at"])

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Keep what all ranks share, and give each its part of the rest.

        Shares of momentum are equal, and add up to Adam's on any number of ranks.
        """
        new = super().redistribute(states, rank, size)
        new["settling"] = dict(states[0]["settling"])
        if self.of_momentum and states[0]["ratio"]:
            new["momentum"] = shares([state["momentum"] for state in states], size)
        new["ratio"] = self.sharded_anew("ratio", states, rank, size)
        return new


class FreezeCriterion:
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
        sample: float32 [values / SAMPLED] of v, k steps ago, by parameter.
    """

    def __init__(self, every: int, below: float, least: int) -> None:
        self.every = checks.integer("exchange.settle_every", every, 2)
        self.below = checks.number("exchange.settle_below", below, above=0, below=1)
        self.least = least
        self.ratio: float | None = None
        self.sample: Moments = {}
        self._sums: Tensor | None = None  # float32 [2]: of differences, and of v
        self._coming: HostCopy | None = None

    def observe(self, name: str, variance: Tensor, correction: float, updates: int) -> None:
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

    def is_met(self, updates: int) -> bool:
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

    def state(self) -> Moments:
        """Return what is kept between steps, for `load`."""
        sums = {} if self._sums is None else {"sums": self._sums}
        return {**sums, **{f"sample.{name}": value for name, value in self.sample.items()}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a result of `state`."""
        kept = {name: value.clone() for name, value in state.items()}
        self._sums, self._coming = kept.pop("sums", None), None
        self.sample = {name.removeprefix("sample."): value for name, value in kept.items()}


class OneBitLamb(OneBitAdam):
    """1-bit LAMB (Li et al. 2021, algorithm 1): 1-bit Adam with a trust ratio for each parameter.

    Signs are of gradients: those of momentum would make directions longer and longer. Ratios
    multiply what has been delivered, so nothing more is sent: each rank finds them from weights and
    directions, which all ranks share. A parameter is a layer.

    The ratio is norm of weights / norm of direction: LAMB (You et al. 2020, algorithm 2) with a
    decay that is decoupled and not scaled. Once the variance is frozen the ratio is too: signs
    would make it jump (Li et al. 2021, section 4). It is then the mean of earlier ratios times a
    factor that makes up for gradients that have grown or shrunk since, as a fresh variance would:
    root of (power of the first directions after freezing / power of the last ones), with power the
    mean square over about MEMORY steps. Li et al. recover gradients from successive momenta, keep a
    fresh variance of each value, and take a parameter's largest ratio of both roots. A power is the
    mean over the parameter's values, and needs two numbers of state.

    Args:
        ratio_range: least and largest ratio.
        ratio_decay: of the mean of ratios.
        factor_range: least and largest factor.
        factor_change: a factor changes by at most this share in a step.
        adam: see OneBitAdam.
    """

    kinds = (*OneBitAdam.kinds, "trust", "power", "power_at_first", "factor")  # these float32 []
    needs_like_gpus = True  # each rank takes norms

    def __init__(
        self,
        ratio_range: Sequence[float] = (0.01, 10.0),
        ratio_decay: float = 0.9,
        factor_range: Sequence[float] = (0.5, 4.0),
        factor_change: float = 0.1,
        **adam: Any,
    ) -> None:
        super().__init__(**adam, signs_of="gradient")
        for key, limits in {"ratio_range": ratio_range, "factor_range": factor_range}.items():
            ends = list(checks.listed(f"exchange.{key}", limits))
            if not (len(ends) == 2 and all(map(is_number, ends)) and 0 < ends[0] <= 1 <= ends[1]):
                raise ValueError(
                    f"exchange.{key}={ends}: must be two numbers above 0, the first at most 1 and "
                    "the second at least 1"
                )
        for key, value in {"ratio_decay": ratio_decay, "factor_change": factor_change}.items():
            checks.number(f"exchange.{key}", value, at_least=0, below=1)
        self.ratio_range, self.factor_range = tuple(ratio_range), tuple(factor_range)
        self.ratio_decay, self.factor_change = ratio_decay, factor_change
        self.weights: dict[str, Tensor] = {}

    def setup(self, model: nn.Module) -> None:
        self.weights = {name: p.detach() for name, p in named(model).items()}

    def add_cost(self, costs: Costs) -> bool:
        """Count 1-bit Adam's passes, norms of directions and weights, and a product."""
        return self.add_signs(costs, before=16, of_shard=12, after=12 + 8 + 8 + 8)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from super().stages(bucket, comm)
        names = list(bucket.shapes)
        values = [bucket.flat[start:stop] for _, start, stop in bucket.spans()]
        norms = torch.stack(torch._foreach_norm(values))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        ratios = (self._frozen_ratios if self.frozen_at else self._ratios)(names, norms)
        torch._foreach_mul_(values, list(ratios.unbind()))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def _ratios(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """Return LAMB's ratios, 1 where a norm is zero; weights that nobody showed are zero."""
        weights = [self.weights.get(name, norms.new_zeros(1)) for name in names]
        of_weights = torch.stack(torch._foreach_norm(weights))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        both = (of_weights > 0) & (norms > 0)
        ratios = torch.where(both, of_weights / norms, 1.0).clamp(*self.ratio_range)
        mean = self._get("trust", names, ratios).lerp(ratios, 1 - self.ratio_decay)
        self._put("trust", names, mean)
        return ratios

    def _frozen_ratios(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """Return the mean ratios, each times its factor."""
        num_frozen, squares = self.updates - self.frozen_at, norms.square()
        power = self._get("power", names, squares)
        power = power.lerp(squares, max(1 / num_frozen, 1 / MEMORY))
        self._put("power", names, power)
        if num_frozen <= MEMORY:
            factor = torch.ones_like(power)
            self._put("power_at_first", names, power)
        else:
            first, last = (self._get(kind, names, norms) for kind in ("power_at_first", "factor"))
            factor = torch.where(power > 0, (first / power).sqrt(), 1.0).clamp(*self.factor_range)
            change = self.factor_change
            factor = factor.clamp(last * (1 - change), last * (1 + change))
        self._put("factor", names, factor)
        return self._get("trust", names, factor) * factor

    def _get(self, kind: str, names: Sequence[str], otherwise: Tensor) -> Tensor:
        """Return what is kept of parameters, float32 [parameters]; `otherwise` at first."""
        kept = self.moments[kind]
        if kept.keys().isdisjoint(names):
            return otherwise
        return torch.stack([kept.get(n, o) for n, o in zip(names, otherwise.unbind(), strict=True)])

    def _put(self, kind: str, names: Sequence[str], values: Tensor) -> None:
        self.moments[kind].update(zip(names, values.unbind(), strict=True))

    def choices(self) -> list[dict[str, Any]]:
        """Return OneBitAdam's choice, and the least and largest ratio and factor."""
        (choice,) = super().choices()
        for kind in ("trust", "factor"):
            values = [float(value) for value in self.moments[kind].values()]
            choice[kind] = [min(values), max(values)] if values else None
        return [choice]


class ZeroOneAdam(SignedDirection):
    """0/1 Adam (Lu et al. 2022, algorithm 1) without its local steps.

    1. In steps at intervals that double (see IntervalSchedule) gradients are averaged exactly, and
       update momentum and variance.
    2. In all others, from the start of the run on, each rank divides its share of the gradient by
       the root of the last variance, adds its residual and sends signs. The sum, times that root,
       updates momentum alone.

    All ranks have the same momentum and variance, so an exact step is one all-reduce. Delivered +
    residuals = true sums of gradients at any time. A rank keeps 16 + 4/N bytes for a value, and
    12 + 4/N once the variance is frozen: momentum, root, residual, its shard's residual, and until
    then the variance.

    Rows that had no gradient before an interval began are not sent until the next one begins (see
    SignedDirection); until then only exact steps see theirs. Rows that never have one do not
    change.

    Args:
        betas, eps: see Adam.
        block_size: values that share the two magnitudes of their signs.
        updates_per_interval, longest_interval: see IntervalSchedule.
    """

    kinds = ("momentum", "variance", "root", *KINDS)

    def __init__(
        self,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        block_size: int = 256,
        updates_per_interval: int = 16,
        longest_interval: int = 16,
    ) -> None:
        super().__init__(betas, eps, block_size)
        self.schedule = IntervalSchedule(updates_per_interval, longest_interval)

    def add_cost(self, costs: Costs) -> bool:
        """Count the passes of a step in signs, as all are once the variance is frozen."""
        return self.add_signs(costs, before=12, of_shard=0, after=12 + 12 + 12 + 8)

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count momentum and root besides what signs need."""
        return Needs(kept=8 * sizes.n + super().memory_bytes(sizes).kept)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        self.begin(bucket, comm)
        exact = self.schedule.is_due(self.updates)
        yield from (self.average_exactly if exact else self._compressed)(bucket, comm)

    def direct_exactly(
        self, name: str, shape: torch.Size, momentum: Tensor, variance: Tensor, out: Tensor
    ) -> None:
        if self.schedule.interval(self.updates) == 1:
            self.adam.direction(momentum, variance, self.updates, out=out)
        else:  # momentum holds errors of signs, even of values without any variance
            torch.div(momentum, self._root(name, shape).view(-1), out=out)
            out.div_(self.adam.correction(0, self.updates))

    def _compressed(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        if self.schedule.is_due(self.updates - 1):
            for name, shape in bucket.shapes.items():
                self._follow_variance(name, shape, comm)
        parts = self.parts(bucket)
        for part in parts:
            part.active.div_(self._of_rows(part.name, part.flat.shape[1]))
        yield from self.sum_signs(bucket, parts, comm)
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
            change = self._of_rows(name, columns, before.view_as(root).div_(root)).flatten()
            self.moments["residual"][name].mul_(change)
            self.moments["shard_residual"][name].mul_(self.shard_of(change, comm))
        if self.schedule.is_first(self.updates):
            self.lay_out(name, active, columns, comm)

    def _root(self, name: str, shape: torch.Size) -> Tensor:
        """Return the root to divide by, float32 [rows, columns]; raise the variance to its square.

        So the root falls no faster than a variance without gradients, by 1 - beta2 at an update.
        Once the variance is frozen, the root takes its memory.
        """
        frozen = self.updates > self.schedule.last
        kept = self.moments["variance"]
        variance = (kept.pop(name) if frozen else kept[name]).view(as_matrix(shape) or (-1, 1))
        raise_least(variance)
        root = variance if frozen else variance.clone()
        root.div_(self.adam.correction(1, self.schedule.num_due(self.updates)))
        return root.sqrt_().add_(self.adam.eps)

    def _of_rows(self, name: str, columns: int, values: Tensor | None = None) -> Tensor:
        """Return the active rows of a parameter's values, by default of the root."""
        values = self.moments["root"][name].view(-1, columns) if values is None else values
        rows = self.rows(name)
        return values if len(rows) == len(values) else values[rows]

    def choices(self) -> list[dict[str, Any]]:
        """Return after how many steps the variance was frozen, and the rows that are not sent."""
        updates = self.schedule.num_due(self.updates)
        frozen_at = self.schedule.last if self.updates > self.schedule.last else None
        return [{"frozen_at": frozen_at, "variance_updates": updates, **self.row_counts()}]


class IntervalSchedule:
    """The steps in which 0/1 Adam updates its variance (Lu et al. 2022, section 6.1).

    `each` of them (kappa in the paper) follow each other at once, `each` at every second step,
    `each` at every fourth, and so on up to every `longest`-th, a power of two; then there are none
    any more, and the variance is frozen. Steps count from 1.
    """

    def __init__(self, each: int, longest: int) -> None:
        self._each = checks.integer("exchange.updates_per_interval", each, 1, 10**5)
        checks.integer("exchange.longest_interval", longest, 1, 2**30)
        if longest & (longest - 1):
            raise ValueError(f"exchange.longest_interval={longest}: must be a power of two")
        doublings = range(longest.bit_length())
        self._due = list(accumulate(2**number for number in doublings for _ in range(each)))
        self.last = self._due[-1]  # the last step that is due

    def interval(self, step: int) -> int:
        """Return the interval at which steps are due at `step`."""
        return 2 ** (min(self.num_due(step - 1), len(self._due) - 1) // self._each)

    def is_due(self, step: int) -> bool:
        return self.num_due(step) > self.num_due(step - 1)

    def is_first(self, step: int) -> bool:
        """Return whether an interval of more than one step begins with `step`, or none is due."""
        return self.is_due(step - 1) and self.num_due(step - 1) % self._each == 0

    def num_due(self, step: int) -> int:
        """Count the steps up to `step` that are due."""
        return bisect_right(self._due, step)
