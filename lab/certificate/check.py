"""CertificateCheck: a training loop calls it to have its first exchanges examined."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from lab.certificate.examination import About, CertificateError, Examination, unchecked
from lab.certificate.traffic import Bucket, ByteCounter
from lab.certificate.watch import Seen, Watch, norm
from lab.exchange.layout import trainable
from lab.record.schema import Certificate
from lab.sync.base import Exchanging, Sync
from lab.sync.ddp import HookState
from lab.sync.gradsync import GradSync
from lab.sync.local import LocalSync
from lab.sync.pattern import Begin, Transfer
from lab.sync.priority import PrioritySync


class Observer:
    """One rank's view of the exchanges of a sync: what goes in, what comes out, what is sent.

    The first exchange is seen as a whole, later ones by the first values of each parameter.

    Args:
        model: names the parameters.
        sync: exchanges their gradients.
    """

    def __init__(self, model: nn.Module, sync: Exchanging, about: About) -> None:
        self._sync = sync
        self._tells = sync if isinstance(sync, GradSync | HookState) else None
        trained = sync.parameters if isinstance(sync, GradSync) else trainable(model)
        self.watch = watch = Watch(model, trained, None if self._tells else self.begin)
        if self._tells:
            self._tells.before_exchange = self._leave
        watch.bounded = 0 < about.error_bound(1.0, about.size) < math.inf
        self.byte_counter = ByteCounter()
        self.buckets: list[Bucket] = []
        self._kept: Tensor | None = None  # before the exchange
        self._begun = False
        self.examination = Examination(about, watch.parameters, watch.names_at_start)

    def begin(self) -> None:
        """Note what is kept, and counted, before an exchange."""
        self._kept = self.watch.residual_images(self._sync.exchange, self._sync.comm)
        self.buckets = self._sync.bucket_values()
        self.byte_counter.start(self._sync.sent()[0])
        self._begun = True

    def seen(self, factor: float, kept_factor: float = 1.0) -> Seen:
        """Return what this rank has seen of the exchange that has ended.

        Args:
            factor: of the loss; gradients are divided by it.
            kept_factor: by which to multiply errors kept, to have them in units of the gradients.
        """
        if not self._begun:  # backward reached nothing on this rank
            self.begin()
        assert self._kept is not None
        watch = self.watch
        start = watch.no_start() if self.examination.num_exchanges else watch.start()
        after = watch.residual_images(self._sync.exchange, self._sync.comm)
        return watch.seen(start, kept_factor * self._kept, kept_factor * after, factor)

    def sent(self) -> Tensor:
        """Return the bytes since `begin`, for Examination.add."""
        if not self.buckets:  # a hook knows them afterwards
            self.buckets = self._sync.bucket_values()
        return self.byte_counter.stop(self._sync.sent()[0])

    def add(self, seen: Seen) -> None:
        """Have the exchange judged, and get ready for the next one. A collective call.

        Raises: CertificateError: names what is wrong.
        """
        if self.examination.add(seen, self.sent(), self.buckets):
            self.watch.head_only = True  # from now on
        self.forget()

    def forget(self) -> None:
        """Be ready for the gradients of the next step."""
        self.watch.reset()
        self._begun = False

    def close(self) -> None:
        self.watch.close()
        if self._tells:
            self._tells.before_exchange = None

    @torch.no_grad()
    def _leave(self, first: bool, gradients: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Note gradients that are about to leave; `first`: none has in this exchange."""
        if first:
            self.begin()
            self.watch.restart()
        for parameter, gradient in gradients:
            self.watch.note(parameter, gradient)


class CertificateCheck:
    """Examination of a run whose steps call these methods. This one looks at nothing.

    Attributes:
        certificate: the result, once there is one.
        is_over: it looks at no later step; nobody calls it then.
    """

    _is_told = False

    def __init__(self, certificate: Certificate | None = None) -> None:
        self.certificate, self.is_over = certificate, True

    def news(self) -> Certificate | None:
        """Return the certificate once, when it is new."""
        if self.certificate is None or self._is_told:
            return None
        self._is_told = True
        return self.certificate

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, error: object = None, *_: object) -> None: ...

    def after_gradients(self) -> None:
        """Look at the gradients that the optimizer will see."""

    def before_weights(self, last: bool) -> None:
        """Look at weights before they are exchanged; `last`: in the run's last step."""

    def after_weights(self) -> None:
        """Look at weights after they were exchanged, if this sync does so."""


class GradientCheck(CertificateCheck):
    """A check that `finish` leaves the mean of the ranks' gradients on every rank."""

    def __init__(self, model: nn.Module, sync: Sync, about: About) -> None:
        super().__init__()
        self._model, self._sync, self._about = model, sync, about
        self._observer: Observer  # until this is over

    def __enter__(self) -> Self:
        if self.certificate is None:
            self._observer = Observer(self._model, self._sync, self._about)
            self.is_over = False
        return self

    def __exit__(self, kind: object = None, error: object = None, *_: object) -> None:
        if not self.is_over:
            examination = self._end()
            if kind is None:
                self.certificate = examination.certificate()
        if isinstance(error, CertificateError):
            self.certificate = error.certificate

    def after_gradients(self) -> None:
        self._observer.add(self._observer.seen(self._sync.loss_factor))
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._observer.examination.is_done:
            self.certificate = self._end().certificate()

    def _end(self) -> Examination:
        self._observer.close()
        examination = self._observer.examination
        del self._observer  # and what it keeps
        self.is_over = True
        return examination


class LateCheck(GradientCheck):
    """A check of DoubleBuffer: a step's optimizer sees the mean of the step before.

    It waits for an exchange in the step in which it begins, to see which errors that one keeps.
    """

    _before: tuple[Seen, Tensor] | None = None

    def after_gradients(self) -> None:
        observer = self._observer
        self._sync.settle()
        seen, sent = observer.seen(self._sync.loss_factor), observer.sent()
        if self._before is not None:
            arrived = replace(self._before[0], delivered=seen.delivered, filled=seen.filled)
            observer.examination.add(arrived, self._before[1], observer.buckets)
        self._before = seen, sent
        observer.forget()
        self._end_if_done()


class HeldCheck(GradientCheck):
    """A check of PrioritySync, which leaves gradients to the next forward.

    It waits for them in the step in which they are exchanged.
    """

    def after_gradients(self) -> None:
        assert isinstance(self._sync, PrioritySync)
        with self._sync.arrived():
            super().after_gradients()


class RootCheck(GradientCheck):
    """A check of RootUpdate: the root has the mean gradient, and all ranks its weights."""

    def after_gradients(self) -> None:
        self._seen = self._observer.seen(self._sync.loss_factor)

    def after_weights(self) -> None:
        observer = self._observer
        weights = observer.watch.weights()
        on_root = torch.full_like(self._seen.judged, float(self._sync.comm.rank == 0))
        observer.add(replace(self._seen, judged=on_root))
        self._end_if_done()
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
        if not self.is_over:
            self._anchor = self._observer.watch.images(self._local.anchor)
            self._start = torch.cat(
                [self._anchor[:, 0], self._observer.watch.start()[len(self._anchor) :]]
            )
        return self

    def after_gradients(self) -> None:
        """Look at nothing: each rank has its own gradients."""

    def before_weights(self, last: bool) -> None:
        local = self._local
        if last or (local.step + 1) % local.every == 0:
            self._observer.watch.reset()
            self._observer.begin()
            self._weights = self._observer.watch.images()

    def after_weights(self) -> None:
        if self._local.in_round:
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
        observer.examination.add(seen, observer.sent(), observer.buckets)
        self.certificate = self._end().certificate()


def _unchecked(reason: str) -> CertificateCheck:
    return CertificateCheck(unchecked(reason))


def check_of(
    model: nn.Module,
    sync: Sync,
    gather: Callable[[Tensor], Tensor],
    num_launched: int,
    exchange: Mapping[str, Any],
    strategy: str,
) -> CertificateCheck:
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
        return CertificateCheck()
    name = type(sync.exchange).__name__
    if not pattern.transfers or (pattern.takes_exchanges and name == "NoExchange"):
        return _unchecked(f"strategy={strategy} exchanges nothing")
    if pattern.takes_exchanges and not sync.exchange.keeps_replicas_equal:
        return _unchecked(f"exchange={name} does not keep replicas equal")
    if pattern.takes_exchanges and sync.exchange.delivers != "mean":
        return _unchecked(
            f"strategy={strategy} produces a {sync.exchange.delivers}, not mean gradients"
        )
    who = sync if pattern.by_library else sync.exchange
    about = About(
        gather,
        size=num_launched,
        num_launched=num_launched,
        backend=sync.comm.backend,
        name=f"{'sync' if pattern.by_library else 'exchange'}={type(who).__name__}",
        error_bound=sync.error_bound,
        settings=exchange,
        nodes=sync.comm.nodes,
        exchange=None if pattern.by_library else sync.exchange,
    )
    if pattern.transfers == (Transfer.GRADIENTS_TO_ROOT, Transfer.WEIGHTS_FROM_ROOT):
        return RootCheck(model, sync, replace(about, promise="gradients averaged once at the root"))
    if type(sync) is LocalSync:  # others send fragments, or moments, at times of their own
        return ChangeCheck(model, sync, replace(about, promise="weight changes averaged once"))
    if isinstance(sync, PrioritySync):
        return HeldCheck(model, sync, about)
    if pattern.transfers == (Transfer.MEAN_OF_GRADIENTS,):
        if pattern.begins is Begin.NEXT_STEP:
            late = replace(about, promise="gradients averaged once, a step late,")
            return LateCheck(model, sync, late)
        if pattern.begins in (Begin.DURING_BACKWARD, Begin.AFTER_BACKWARD):
            return GradientCheck(model, sync, about)
    return _unchecked(
        f"strategy={strategy} does not promise a mean of gradients or weights in every step"
    )
