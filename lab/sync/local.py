"""Syncs whose ranks train on their own, and average their weights every few steps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.distributed.comm import Sent
from lab.exchange.layout import is_fusible
from lab.settings import checks
from lab.sync import pattern as rules
from lab.sync.base import SyncParts, SyncState, all_finite
from lab.sync.gradsync import GradSync
from lab.sync.pattern import Pattern

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
        super().__init__(parts, pattern)
        self.divides_loss = False
        # No exchange waits for backward: any order will do.
        self._follow(list(self._arrivals.buckets_of))
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
    The inner optimizer's state is never exchanged. Settings: conf/sync/local.yaml.

    Args:
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
        checks.number("sync.outer_lr", outer_lr, above=0)
        checks.number("sync.outer_momentum", outer_momentum, at_least=0, below=1)
        super().__init__(parts, pattern or rules.local(every))
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

    @torch.no_grad()
    def after_update(self, last: bool) -> Tensor | None:
        self.in_round = not last and (self.step + 1) % self.every != 0
        finite = None
        if not self.in_round:
            self._leave_changes(self.parameters)
            finite = self._average()
            self._move_anchor(self.parameters)
        self.step += 1
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
        momentum = {
            name: state[p]["momentum_buffer"] for name, p in self.parameters.items() if p in state
        }
        anchor = self.anchor if self.in_round else {}
        return {**super().state_dict(), "anchor": anchor, "momentum": momentum}

    def load_state_dict(self, state: SyncState) -> None:
        super().load_state_dict(state)
        self.anchor = state.get("anchor", {})
        self.in_round = bool(self.anchor)
        for name, momentum in state.get("momentum", {}).items():
            self.outer.state[self.parameters[name]]["momentum_buffer"] = momentum


class DesLoc(LocalSteps):
    """Desynchronised local steps (Iacob et al., ICLR 2026, arXiv 2505.22549, "DES-LOC").

    Each rank takes steps with its own gradients. After each step whose number is a multiple of
    `every` (the paper's K_x) weights become their mean over the ranks; of `first_every` (K_u), the
    optimizer's first moments; of `second_every` (K_v), its second moments. Slowly changing moments
    need fewer exchanges. With three equal periods this is Local Adam. Weights are averaged after
    the run's last step too.

    The exchange must be exact: a second moment rounded to 0 makes Adam's step arbitrarily large.
    Settings: conf/sync/des_loc.yaml.

    Raises:
        ValueError: a period is no integer of at least 1, or the exchange is not exact.
    """

    def __init__(
        self, parts: SyncParts, *, every: int, first_every: int, second_every: int | None
    ) -> None:
        super().__init__(parts, rules.des_loc(every, first_every, second_every))
        self.weights_every = every
        self.moments = {"first_every": (first_every, FIRST), "second_every": (second_every, SECOND)}
        self.optimizer: Optimizer | None = None  # known from the first update on

    def update(self, optimizer: Optimizer) -> None:
        """Take the optimizer's step; refuse an optimizer without the moments to be averaged."""
        super().update(optimizer)
        if self.optimizer is optimizer:
            return
        self.optimizer = optimizer
        for key, (period, names) in self.moments.items():
            if period is not None and not self._moments(names):
                kind = type(optimizer).__name__
                null = ", or set null" if key == "second_every" else ""
                raise ValueError(
                    f"sync.{key}={period}: {kind} has no {' or '.join(names)}; "
                    f"use optim=adamw{null}"
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
        states = cast(dict[nn.Parameter, dict[str, Any]], self.optimizer.state)
        return {
            parameter: value
            for parameter, p in self.parameters.items()
            for name in names
            if isinstance(value := states.get(p, {}).get(name), Tensor)
        }


class StreamingSync(LocalSync):
    """Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, algorithm 2).

    The model is divided into P fragments. Each is exchanged every H steps, as LocalSync exchanges
    the whole model, but H/P steps after the one before it, so that a P-th of the bytes travels at
    once. An exchange runs while the next `delay` steps compute. Then the anchor of its fragment
    moves, and the weights, which have moved on, become
    `alpha * weights + (1 - alpha) * anchor`. After the run's last step all fragments are exchanged,
    and weights are their anchors.

    With one fragment, no delay and alpha 0 this is LocalSync, bit for bit. `overlap` chooses a
    worker that runs while the rank computes, so it must be `delay > 0` (tau in the paper).
    Settings: conf/sync/streaming.yaml.

    Raises:
        ValueError: an argument out of range, or more fragments than layers.
    """

    def __init__(
        self,
        parts: SyncParts,
        *,
        every: int,
        outer_lr: float,
        outer_momentum: float,
        fragments: int,
        fragment_order: str,
        delay: int,
        alpha: float,
    ) -> None:
        super().__init__(
            parts,
            every=every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            pattern=rules.streaming(every, fragments, fragment_order, delay),
        )
        checks.number("sync.alpha", alpha, at_least=0, below=1)
        self.delay, self.alpha = delay, alpha
        sizes = [(name, p.nbytes) for name, p in self.parameters.items()]
        self.fragments = rules.fragments(sizes, fragments, fragment_order)
        self._plans = [self._plan(self.order, only=names) for names in self.fragments]
        self._all = [*chain(*self._plans)]
        self._use(self._all)
        # The last fragment at the end of a round, the others at equal distances before it.
        # By steps done modulo `every`.
        self._turns = {(1 + n) * every // fragments % every: n for n in range(fragments)}
        self.arriving: dict[str, Tensor] = {}  # changes of a fragment under way; means once there
        self._sent = 0, 0, 0

    def __enter__(self) -> Self:
        super().__enter__()
        self._sent = super().sent()
        if self.delay:
            self._advance_at_gradients()
        return self

    @torch.no_grad()
    def after_update(self, last: bool) -> Tensor | None:
        done = self.step + 1
        begins = self._turns.get(done % self.every)
        arrives = (done - self.delay) % self.every in self._turns
        found: list[Tensor | None] = []
        if self.arriving and (arrives or begins is not None or last):
            found.append(self._receive(self.alpha))
        for number in range(len(self.fragments)) if last else () if begins is None else (begins,):
            self._send(number)
            if last or not self.delay:
                found.append(self._receive(0.0 if last else self.alpha))
        moved_all = begins is not None and len(self.fragments) == 1 and not self.delay
        self.in_round = not (last or (moved_all and not self.alpha))
        self.step = done
        return all_finite(found)

    def _send(self, number: int) -> None:
        self._leave_changes(self.fragments[number])
        self._use(self._plans[number])
        while len(self._exchanged) < len(self.buckets):
            self._submit_next()
        for name in self.fragments[number]:
            gradient = self.parameters[name].grad
            assert gradient is not None  # a bucket gave it one
            self.arriving[name], self.parameters[name].grad = gradient, None

    def _receive(self, own_share: float) -> Tensor | None:
        """Wait for the fragment under way, and move its anchor and weights."""
        self.settle()
        if self.drift:
            self.drift.end_step()
        finite = all_finite(bucket.finite for bucket in self._exchanged)
        for name, mean in self.arriving.items():
            self.parameters[name].grad = mean
        self._move_anchor(self.arriving, own_share)
        self.arriving = {}
        self._use(self._all)
        return finite

    def sent(self) -> Sent:
        return self._sent

    def settle(self) -> None:
        self.worker.wait()
        self._sent = super().sent()  # later, an exchange under way may have sent a part

    def state_dict(self) -> SyncState:
        """Return LocalSync's state and the means that have arrived early. Settle first."""
        return {**super().state_dict(), "arriving": dict(self.arriving)}

    def load_state_dict(self, state: SyncState) -> None:
        """Continue. Means of a fragment that this run has not are dropped: its anchor stays where
        it was, so its next exchange covers the same change.
        """
        super().load_state_dict(state)
        arriving = state.get("arriving", {})
        known = any(set(names) == set(arriving) for names in self.fragments)
        self.arriving = arriving if known else {}
