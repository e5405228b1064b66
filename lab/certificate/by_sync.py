"""The check that fits what a sync promises."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from lab.certificate.check import Check, Observer, Unchecked
from lab.certificate.examination import About
from lab.certificate.report import CertificateError, unchecked
from lab.certificate.sketch import norm
from lab.certificate.watch import Seen
from lab.sync.base import Sync
from lab.sync.local import LocalSync
from lab.sync.pattern import Begin, Leg
from lab.sync.priority import PrioritySync


class GradientCheck(Check):
    """A check that `finish` leaves the mean of the ranks' gradients on every rank."""

    def __init__(self, model: nn.Module, sync: Sync, about: About) -> None:
        self._model, self._sync, self._about = model, sync, about
        self._observer: Observer | None = None

    def __enter__(self) -> Self:
        if self.certificate is None:
            self._observer = Observer(self._model, self._sync, self._about)
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        if self._observer and kind is None:
            self._issue(self._observer)
        elif self._observer:
            self._observer.close()

    def after_gradients(self) -> None:
        if self._observer:
            seen = self._observer.seen(self._sync.loss_factor)
            self._judge(self._observer, seen)

    def _judge(self, observer: Observer, seen: Seen) -> None:
        with self._noting_faults():
            observer.add(seen)
        if observer.is_done:
            self._issue(observer)

    def _issue(self, observer: Observer) -> None:
        self._observer = None
        observer.close()
        self.certificate = observer.examination.certificate()

    @contextmanager
    def _noting_faults(self) -> Generator[None]:
        try:
            yield
        except CertificateError as error:
            self.certificate = error.certificate
            raise


class LateCheck(GradientCheck):
    """A check of DoubleBuffer: a step's optimizer sees the mean of the step before.

    It waits for an exchange in the step in which it begins, to see which errors that one keeps.
    """

    _before: tuple[Seen, Tensor] | None = None

    def after_gradients(self) -> None:
        observer = self._observer
        if observer is None:
            return
        self._sync.settle()
        seen, sent = observer.seen(self._sync.loss_factor), observer.sent()
        if self._before is not None:
            arrived = replace(self._before[0], delivered=seen.delivered, filled=seen.filled)
            with self._noting_faults():
                observer.examination.add(arrived, self._before[1], observer.buckets)
        self._before = seen, sent
        observer.forget()
        if observer.is_done:
            self._issue(observer)


class HeldCheck(GradientCheck):
    """A check of PrioritySync, which leaves gradients to the next forward.

    It waits for them in the step in which they are exchanged.
    """

    def __init__(self, model: nn.Module, sync: PrioritySync, about: About) -> None:
        super().__init__(model, sync, about)
        self._priority = sync

    def after_gradients(self) -> None:
        if self._observer:
            with self._priority.arrived():
                super().after_gradients()


class RootCheck(GradientCheck):
    """A check of RootUpdate: the root has the mean gradient, and all ranks its weights."""

    def after_gradients(self) -> None:
        if self._observer:
            self._seen = self._observer.seen(self._sync.loss_factor)

    def after_weights(self) -> None:
        if observer := self._observer:
            weights = observer.watch.weights()
            on_root = torch.full_like(self._seen.judged, float(self._sync.comm.rank == 0))
            self._judge(observer, replace(self._seen, judged=on_root))
            with self._noting_faults():
                observer.examination.check_weights(weights)


class ChangeCheck(GradientCheck):
    """A check of LocalSync: the anchor moves by the mean of the ranks' changes.

    It looks at the first round. There, outer momentum is the mean itself, so the anchor moves by
    outer_lr * (1 + outer_momentum) of it, by Nesterov's rule.
    """

    def __init__(self, model: nn.Module, sync: LocalSync, about: About) -> None:
        super().__init__(model, sync, about)
        self._local = sync

    def __enter__(self) -> Self:
        if self._local.outer.state and self.certificate is None:
            self.certificate = unchecked("outer momentum was resumed")
        super().__enter__()
        if self._observer:
            self._anchor = self._observer.watch.images(self._local.anchor)
            self._start = torch.cat(
                [self._anchor[:, 0], self._observer.watch.start()[len(self._anchor) :]]
            )
        return self

    def after_gradients(self) -> None:
        """Look at nothing: each rank has its own gradients."""

    def before_weights(self, last: bool) -> None:
        local = self._local
        if self._observer and (last or (local.step + 1) % local.every == 0):
            self._observer.watch.reset()
            self._observer.begin()
            self._weights = self._observer.watch.images()

    def after_weights(self) -> None:
        if self._observer is None or self._local.in_round:
            return
        observer, (group, *_) = self._observer, self._local.outer.param_groups
        moved = self._anchor - observer.watch.images()
        seen = observer.seen(1.0)
        own = self._anchor - self._weights
        every = torch.ones_like(seen.reached)
        scale = norm(torch.stack([self._anchor, self._weights])).amax(dim=(0, -1))
        seen = replace(
            seen,
            start=self._start,
            own=own,
            sent=own + seen.sent - seen.own,
            delivered=moved / (group["lr"] * (1 + group["momentum"])),
            reached=every,
            filled=every,
            scale=torch.maximum(seen.scale, scale),
            largest=scale,  # no change of a value exceeds the norm of all
        )
        with self._noting_faults():
            observer.examination.add(seen, observer.sent(), observer.buckets)
        self._issue(observer)


def check_of(
    model: nn.Module,
    sync: Sync,
    gather: Callable[[Tensor], Tensor],
    num_launched: int,
    exchange: Mapping[str, Any],
    strategy: str,
) -> Check:
    """Return the check of a run.

    Args:
        model: names its parameters; all of its ranks call this.
        gather: returns every rank's tensor, over other connections than the sync's.
        num_launched: ranks that were started; of one, nothing is looked at.
        exchange: settings of the sync's exchange.
        strategy: name, for messages.
    """
    pattern = sync.pattern
    if num_launched == 1:
        return Check()
    moves_nothing = pattern.takes_exchanges and not sync.exchange.keeps_replicas_equal
    if not pattern.legs or moves_nothing:
        return Unchecked(f"strategy={strategy} exchanges nothing")
    if pattern.takes_exchanges and sync.exchange.delivers != "mean":
        return Unchecked(f"strategy={strategy} leaves a {sync.exchange.delivers}, no mean")
    who = sync if pattern.by_library else sync.exchange
    about = About(
        gather,
        size=num_launched,
        num_launched=num_launched,
        backend=sync.comm.backend,
        name=f"{'sync' if pattern.by_library else 'exchange'}={type(who).__name__}",
        error_bound=sync.error_bound,
        settings=exchange,
        counts_itself=not pattern.by_library,
        nodes=sync.comm.nodes,
        exchange=None if pattern.by_library else sync.exchange,
    )
    if pattern.legs == (Leg.GRADIENTS_TO_ROOT, Leg.WEIGHTS_FROM_ROOT):
        return RootCheck(model, sync, replace(about, promise="gradients averaged once at the root"))
    if type(sync) is LocalSync:  # others send fragments, or moments, at times of their own
        return ChangeCheck(model, sync, replace(about, promise="weight changes averaged once"))
    if isinstance(sync, PrioritySync):
        return HeldCheck(model, sync, about)
    if pattern.legs == (Leg.MEAN_OF_GRADIENTS,):
        if pattern.begins is Begin.NEXT_STEP:
            late = replace(about, promise="gradients averaged once, a step late,")
            return LateCheck(model, sync, late)
        if pattern.begins in (Begin.DURING_BACKWARD, Begin.AFTER_BACKWARD):
            return GradientCheck(model, sync, about)
    return Unchecked(f"strategy={strategy} promises no mean of gradients or weights in every step")
