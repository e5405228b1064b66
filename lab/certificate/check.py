"""Check: the calls of a training loop that have its first exchanges examined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from lab.certificate.examination import About, Examination
from lab.certificate.report import unchecked
from lab.certificate.traffic import Bucket, Odometer
from lab.certificate.watch import Seen, Watch
from lab.distributed.comm import Comm, Sent
from lab.exchange.base import Exchange
from lab.record.certificate import Certificate
from lab.sync.ddp_hook import HookState
from lab.sync.gradsync import GradSync

NUM_EXCHANGES = 3  # buckets are planned anew after the first, and used again in the third


class Exchanging(Protocol):
    """The part of a Sync, or of a hook's state, that is observed."""

    @property
    def exchange(self) -> Exchange: ...
    @property
    def comm(self) -> Comm: ...
    def sent(self) -> Sent: ...
    def bucket_shapes(self) -> list[list[tuple[int, ...]]]: ...
    def bucket_itemsizes(self) -> list[int]: ...


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
        self.watch = watch = Watch(model, None if self._tells else self.begin)
        if self._tells:
            self._tells.before_exchange = self._leave
        watch.bounded = 0 < about.error_bound(1.0, about.size) < math.inf
        self.odometer = Odometer()
        self.buckets: list[Bucket] = []
        self._kept: Tensor | None = None  # before the exchange
        self._begun = False
        parameters = [*watch.parameters.values()]
        self.examination = Examination(about, watch.names, watch.names_at_start, parameters)

    @property
    def is_done(self) -> bool:
        """True after as many exchanges as are looked at."""
        return self.examination.num_exchanges >= NUM_EXCHANGES

    def begin(self) -> None:
        """Note what is kept, and counted, before an exchange."""
        self._kept = self._kept_now()
        self.buckets = self._buckets_now()
        self.odometer.start(self._sync.sent()[0])
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
        before, after = kept_factor * self._kept, kept_factor * self._kept_now()
        return watch.seen(start, before, after, factor)

    def sent(self) -> Tensor:
        """Return the bytes since `begin`, for Examination.add."""
        self.buckets = self.buckets or self._buckets_now()  # a hook knows them afterwards
        return self.odometer.stop(self._sync.sent()[0])

    def add(self, seen: Seen) -> None:
        """Have the exchange judged, and get ready for the next one. A collective call.

        Raises:
            CertificateError: names what is wrong.
        """
        if self.examination.add(seen, self.sent(), self.buckets):
            self.watch.head_only = True  # from now on
        self.forget()

    def forget(self) -> None:
        """Be ready for the gradients of the next step."""
        self.watch.reset()
        self._begun = False

    def close(self) -> None:
        """Look no more."""
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

    def _buckets_now(self) -> list[Bucket]:
        shapes = self._sync.bucket_shapes()
        sizes = self._sync.bucket_itemsizes() or [4] * len(shapes)
        return [*zip(shapes, sizes, strict=True)]

    def _kept_now(self) -> Tensor:
        return self.watch.kept(self._sync.exchange, self._sync.comm)


class Check:
    """Examination of a run whose steps call these methods. This one looks at nothing.

    Attributes:
        certificate: the result, once there is one.
    """

    certificate: Certificate | None = None
    _is_told = False

    def news(self) -> Certificate | None:
        """Return the certificate once, when it is new."""
        if self.certificate is None or self._is_told:
            return None
        self._is_told = True
        return self.certificate

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None: ...

    def after_gradients(self) -> None:
        """Look at the gradients that the optimizer will see."""

    def before_weights(self, last: bool) -> None:
        """Look at weights before they are exchanged; `last`: in the run's last step."""

    def after_weights(self) -> None:
        """Look at weights after they were exchanged, if this sync does so."""


class Unchecked(Check):
    """A check of a sync that promises nothing that could be checked."""

    def __init__(self, reason: str) -> None:
        self.certificate = unchecked(reason)
