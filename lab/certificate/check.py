"""Check: the calls of a training loop that have its first exchanges examined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from torch import Tensor, nn

from lab.certificate.examination import About, Examination
from lab.certificate.report import unchecked
from lab.certificate.traffic import Odometer, Shapes
from lab.certificate.watch import Seen, Watch
from lab.distributed.comm import Comm, Sent
from lab.exchange.base import Exchange
from lab.record.certificate import Certificate

NUM_EXCHANGES = 3  # buckets are planned anew after the first, and used again in the third


class Exchanging(Protocol):
    """The part of a Sync, or of a hook's state, that is observed."""

    @property
    def exchange(self) -> Exchange: ...
    @property
    def comm(self) -> Comm: ...
    def sent(self) -> Sent: ...
    def bucket_shapes(self) -> list[Shapes]: ...


class Observer:
    """One rank's view of the exchanges of a sync: what goes in, what comes out, what is sent.

    The first exchange is seen as a whole, later ones by the first values of each parameter.

    Args:
        model: names the parameters.
        sync: exchanges their gradients.
        on_gradient: called when a gradient appears.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: Exchanging,
        about: About,
        on_gradient: Callable[[], None] = lambda: None,
    ) -> None:
        self._sync, self._on_gradient = sync, on_gradient
        self.watch = watch = Watch(model, self._gradient)
        watch.bounded = 0 < about.error_bound(1.0, about.size) < math.inf
        self.odometer = Odometer()
        self.buckets: list[Shapes] = []
        self._kept: Tensor | None = None  # before the exchange
        self._begun = False
        parameters = [*watch.parameters.values()]
        self.examination = Examination(
            about, watch.names, watch.names_at_start, parameters, lambda: watch.late_names
        )

    @property
    def is_done(self) -> bool:
        """True after as many exchanges as are looked at."""
        return self.examination.num_exchanges >= NUM_EXCHANGES

    def begin(self) -> None:
        """Note what is kept, and counted, before an exchange."""
        if self._kept is None:
            self._kept = self._kept_now()
        self.buckets = self._sync.bucket_shapes()
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
        before, self._kept = self._kept, self._kept_now()
        assert before is not None
        self._before = before
        watch = self.watch
        start = watch.no_start() if self.examination.num_exchanges else watch.start()
        return watch.seen(start, kept_factor * before, kept_factor * self._kept, factor)

    def sent(self) -> Tensor:
        """Return the bytes since `begin`, for Examination.add."""
        self.buckets = self.buckets or self._sync.bucket_shapes()  # DDP plans its first ones late
        return self.odometer.stop(self._sync.sent()[0])

    def add(self, seen: Seen, judged: Sequence[int] | None = None) -> None:
        """Have the exchange judged, and get ready for the next one. A collective call.

        Raises:
            CertificateError: names what is wrong.
        """
        if self.examination.add(seen, self.sent(), self.buckets, judged):
            self.turn()
        else:  # a gradient overflowed, and the loop undoes the step
            self._kept = self._before
        self.forget()

    def forget(self) -> None:
        """Be ready for the gradients of the next step."""
        self.watch.reset()
        self._begun = False

    def turn(self) -> None:
        """Look at the first values alone from now on."""
        assert self._kept is not None
        self._kept = self._kept[:, -1:]
        self.watch.head_only = True

    def _gradient(self, first: bool) -> None:
        if first:
            self.begin()
        self._on_gradient()

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
