"""Syncs whose ranks train on their own, and average their weights every few steps.

LocalSteps is what they share. LocalSync averages weights alone, DesLoc an optimizer's moments too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from lab.exchange.base import require_mean
from lab.exchange.layout import is_fusible
from lab.settings import checks
from lab.sync.base import SyncParts, SyncState
from lab.sync.gradsync import GradSync
from lab.sync.pattern import Pattern, des_loc, local

FIRST = ("exp_avg", "momentum_buffer")  # a first moment, as optimizers of torch name it
SECOND = ("exp_avg_sq",)


class LocalSteps(GradSync):
    """A sync whose ranks take steps with their own gradients, and exchange after some updates.

    Attributes:
        in_round: ranks may have different weights.

    Raises:
        ValueError: an exchange that does not average.
    """

    asks_who_reached = False  # what is sent is a change of weights, which every rank has

    def __init__(self, parts: SyncParts, pattern: Pattern) -> None:
        require_mean("exchange", parts.exchange)
        super().__init__(parts, pattern)
        self.divides_loss = False
        self._follow(list(self._buckets_of))  # no exchange waits for backward: any order will do
        self.in_round = False

    @property
    def keeps_replicas_equal(self) -> bool:
        return not self.in_round

    def __enter__(self) -> Self:
        return self  # without GradSync's hooks: no bucket waits for a gradient

    def finish(self) -> None:
        """Leave each rank its own gradients."""

    def _average(self) -> Tensor | None:
        """Replace all `grad` by their means over the ranks; see Sync.finish."""
        step = self.step
        finite = super().finish()
        self.step = step  # which the caller counts
        return finite


class LocalSync(LocalSteps):
    """Local SGD, with an outer optimizer (Douillard et al. 2023, "DiLoCo", algorithm 1).

    All ranks begin a round with the same weights, the anchor, and take `every` steps with their own
    gradients. Then `anchor - weights` is exchanged as GradSync exchanges gradients. Its mean is the
    gradient by which an outer SGD with Nesterov momentum moves the anchor, where all ranks begin
    the next round. With `outer_lr=1` and no outer momentum the anchor moves to the mean of the
    weights: local SGD (Stich 2019, algorithm 1; Lin et al. 2020).

    A round ends after each step whose number is a multiple of `every`, and after the last step.
    The inner optimizer's state is never exchanged.

    Args:
        every: steps per round, H in the papers.
        outer_lr, outer_momentum: settings of the outer SGD.
        pattern: a subclass's; None: LocalSync's own.

    Raises:
        ValueError: an argument out of range, or an exchange that does not average.
    """

    def __init__(
        self,
        parts: SyncParts,
        *,
        every: int,
        outer_lr: float,
        outer_momentum: float,
        pattern: Pattern | None = None,
    ) -> None:
        _check_ranges(every, outer_lr, outer_momentum)
        super().__init__(parts, pattern or local(every))
        weights = self.parameters.values()
        self.outer = torch.optim.SGD(
            weights,
            lr=outer_lr,
            momentum=outer_momentum,
            nesterov=outer_momentum > 0,
            fused=all(map(is_fusible, weights)),
        )
        self.anchor: dict[str, Tensor] = {}  # which the weights have left, if in_round

    def __enter__(self) -> Self:
        if not self.in_round:
            self.anchor = {name: p.detach().clone() for name, p in self.parameters.items()}
        return super().__enter__()

    def after_update(self, last: bool) -> Tensor | None:
        self.in_round = not last and (self.step + 1) % self.every != 0
        finite = None if self.in_round else self._end_round()
        self.step += 1
        return finite

    @torch.no_grad()
    def _end_round(self) -> Tensor | None:
        self._leave_changes(self.parameters)
        finite = self._average()
        self._move_anchor(self.parameters)
        return finite

    def _leave_changes(self, names: Iterable[str]) -> None:
        """Leave in `grad` of each parameter how far it has moved away from its anchor, negated."""
        for name in names:
            self.parameters[name].grad = self.anchor[name] - self.parameters[name]

    def _move_anchor(self, names: Iterable[str], own_share: float = 0.0) -> None:
        """Move anchors by the mean changes in `grad`; weights follow, but for a share of theirs."""
        weights: list[Tensor] = [self.parameters[name] for name in names]
        anchor = [self.anchor[name] for name in names]
        own = [weight.clone() for weight in weights] if own_share else []
        torch._foreach_copy_(weights, anchor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        self.outer.step()  # pyright: ignore[reportUnknownMemberType]
        self.outer.zero_grad()
        torch._foreach_copy_(anchor, weights)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        if own:
            torch._foreach_lerp_(weights, own, own_share)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def state_dict(self) -> SyncState:
        """Return the anchor, unless it equals the weights, and the outer momentum."""
        state = self.outer.state
        moved = {name: p for name, p in self.parameters.items() if p in state}
        momentum = {name: state[p]["momentum_buffer"] for name, p in moved.items()}
        anchor = self.anchor if self.in_round else {}
        return {**super().state_dict(), "anchor": anchor, "momentum": momentum}

    def load_state_dict(self, state: SyncState) -> None:
        super().load_state_dict(state)
        self.anchor = state.get("anchor", {})
        self.in_round = bool(self.anchor)
        for name, momentum in state.get("momentum", {}).items():
            self.outer.state[self.parameters[name]]["momentum_buffer"] = momentum


def _check_ranges(every: object, outer_lr: object, outer_momentum: object) -> None:
    checks.whole("sync.every", every, 1)
    checks.number("sync.outer_lr", outer_lr, above=0)
    checks.number("sync.outer_momentum", outer_momentum, at_least=0, below=1)


class DesLoc(LocalSteps):
    """Desynchronised local steps (Iacob et al., ICLR 2026, arXiv 2505.22549, "DES-LOC").

    Each rank takes steps with its own gradients. After each step whose number is a multiple of
    `every` (the paper's K_x) weights become their mean over the ranks; of `first_every` (K_u), the
    optimizer's first moments; of `second_every` (K_v), its second moments. Slowly changing moments
    need fewer exchanges. With three equal periods this is Local Adam. Weights are averaged after
    the run's last step too.

    The values themselves are exchanged, not their changes, so the exchange must be exact: rounded
    towards 0, a second moment would make Adam's next step arbitrarily large.

    Args:
        every, first_every, second_every: in steps; `second_every` None: the optimizer has none.

    Raises:
        ValueError: a period is no integer of at least 1, or the exchange is not exact.
    """

    def __init__(
        self, parts: SyncParts, *, every: int, first_every: int, second_every: int | None
    ) -> None:
        super().__init__(parts, des_loc(every, first_every, second_every))
        if not parts.exchange.exact:
            name = type(parts.exchange).__name__
            raise ValueError(f"exchange={name}: is not exact; second moments need one that is")
        self.weights_every = every
        self.moments = {"first_every": (first_every, FIRST), "second_every": (second_every, SECOND)}
        self.optimizer: Optimizer | None = None  # known from the first update on

    def update(self, optimizer: Optimizer) -> None:
        """Take the optimizer's step.

        Raises:
            ValueError: the optimizer has no moment of a kind that is to be averaged.
        """
        super().update(optimizer)
        if self.optimizer is optimizer:
            return
        self.optimizer = optimizer
        for key, (period, names) in self.moments.items():
            if period is not None and not self._moments(names):
                kind = type(optimizer).__name__
                null = " or null" if key == "second_every" else ""
                raise ValueError(
                    f"sync.{key}={period}: {kind} keeps no {' or '.join(names)}; "
                    f"must be optim=adamw{null}"
                )

    @torch.no_grad()
    def after_update(self, last: bool) -> Tensor | None:
        self.step += 1
        weights_due = last or self.step % self.weights_every == 0
        self.in_round = not weights_due
        if weights_due:
            self._average_values({name: p.detach() for name, p in self.parameters.items()})
        for period, names in self.moments.values():
            if period is not None and self.step % period == 0:
                self._average_values(self._moments(names))
        return None  # exact exchanges do not check

    def _average_values(self, values: dict[str, Tensor]) -> None:
        """Replace `values`, by parameter, by their means over the ranks."""
        for name, value in values.items():
            self.parameters[name].grad = value
        self._average()
        for name, value in values.items():
            mean = self.parameters[name].grad
            assert mean is not None
            if mean.data_ptr() != value.data_ptr():  # else exchanged in place
                value.copy_(mean)
        for parameter in self.parameters.values():
            parameter.grad = None

    def _moments(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the moment with one of `names`, of each parameter that has it."""
        assert self.optimizer is not None  # an update came first
        found: dict[str, Tensor] = {}
        for parameter, p in self.parameters.items():
            state: dict[str, Any] = self.optimizer.state.get(p, {})
            for name in names:
                if isinstance(value := state.get(name), Tensor):
                    found[parameter] = value
        return found
