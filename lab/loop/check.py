"""check="first" in a loop of the user's own, which calls no Check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lab.certificate.check import Exchanging, Observer
from lab.certificate.diagnosis import apart
from lab.certificate.examination import About
from lab.certificate.report import CertificateError, unchecked
from lab.distributed.world import World
from lab.record.certificate import Certificate
from lab.record.files import write_json
from lab.settings.errors import ConfigError
from lab.sync.ddp_hook import HookState

CHOICES = (None, "first")
FORGOTTEN = 1e-3  # relative distance at which gradients before an update are the rank's own


class LoopCheck:
    """Examination of the first exchanges of a loop.

    It also looks at the optimizers of the model, before each update, because a loop may forget the
    exchange.

    Args:
        model: names its parameters.
        sync: exchanges their gradients.
        world: its ranks.
        settings: the composed settings of the exchange.
        file: where rank 0 writes the certificate; None: nowhere.
        forgotten: describes an update without an exchange.

    Attributes:
        certificate: the result, once there is one.

    Raises:
        ConfigError: the file's folder does not exist.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: Exchanging,
        world: World,
        settings: Mapping[str, Any],
        file: str | Path | None,
        forgotten: Callable[[bool], str],
    ) -> None:
        self._file = Path(file) if file else None
        if self._file and not self._file.absolute().parent.is_dir():
            raise ConfigError(f"certificate={file}: its folder does not exist")
        self.certificate: Certificate | None = None
        self._model, self._sync, self._world = model, sync, world
        self._about = About(
            world.gather,
            size=world.size,
            num_launched=dist.get_world_size(),
            backend=world.comm.backend,
            name=f"exchange={type(sync.exchange).__name__}",
            error_bound=sync.exchange.error_bound,
            settings=settings["exchange"],
            exchange=sync.exchange,
        )
        self._forgotten = forgotten
        self._observer: Observer | None = None

    def begin(self, on_gradient: Callable[[], None] = lambda: None) -> None:
        """Look at the exchanges from now on."""
        if self._world.size == 1:
            self._end(unchecked("one rank has nothing to exchange"))
            return
        self._observer = Observer(self._model, self._sync, self._about, on_gradient)
        self._before_updates = register_optimizer_step_pre_hook(self._before_update)

    def exchanged(self, kept_factor: float) -> None:
        """Judge an exchange that has ended.

        Args:
            kept_factor: by which to multiply errors kept, to have them in units of the gradients.

        Raises:
            CertificateError: names what is wrong.
        """
        if (observer := self._observer) is None:
            return
        try:
            observer.add(observer.seen(1.0, kept_factor))
            if observer.is_done:
                self._end(observer.examination.certificate())
        except CertificateError as error:
            self._end(error.certificate)
            raise

    def close(self) -> None:
        """Look no more. A collective call, if there have been too few exchanges so far."""
        if self._observer:
            self._end(self._observer.examination.certificate())

    def abandon(self) -> None:
        """Look no more, after an error."""
        if self._observer:
            self._observer.watch.close()
            self._before_updates.remove()
            self._observer = None

    def _end(self, certificate: Certificate) -> None:
        self.certificate = certificate
        self.abandon()
        if self._world.rank:
            return
        if self._file:
            write_json(self._file, asdict(certificate))
        if certificate.holds:  # an exception says it otherwise
            print(certificate.line, flush=True)

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        """Refuse an update by gradients that no exchange has seen.

        Raises:
            CertificateError: there was none since the last backward.
        """
        observer = self._observer
        if observer is None or not observer.watch.reached:
            return
        ours = {id(parameter) for parameter in observer.watch.parameters.values()}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        seen = observer.seen(1.0)
        if not seen.is_finite():
            return
        own, delivered = seen.own.flatten(), seen.delivered.flatten()
        factor = (own @ delivered) / (own @ own)  # clipping and scales leave the direction
        try:
            observer.examination.fail(
                "exchanged", self._forgotten(apart(delivered, factor * own) < FORGOTTEN)
            )
        except CertificateError as error:
            self._end(error.certificate)
            raise


class HookCheck:
    """A LoopCheck of DDP's hook: an exchange has ended when backward has, unless in no_sync."""

    def __init__(self, check: LoopCheck, state: HookState) -> None:
        self._check, self._state = check, state
        self._step = state.step
        self._is_queued = False
        check.begin(self._gradient)

    def _gradient(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        """Wait for what DDP itself has queued."""
        Variable._execution_engine.queue_callback(self._backward_has_ended)

    def _backward_has_ended(self) -> None:
        self._is_queued = False
        if self._state.step == self._step:  # within no_sync, or the hook was not called
            return
        self._step = self._state.step
        self._check.exchanged(self._state.loss_scale)


def forgot_finish(is_own: bool) -> str:
    """Describe an update before `finish`."""
    return "not exchanged: optimizer.step() comes before sync.finish(), with " + (
        "the rank's own gradients" if is_own else "gradients of another exchange"
    )


def forgot_hook(is_own: bool) -> str:
    """Describe an update of gradients that DDP's hook has not seen."""
    why = (
        "they are the rank's own: was a step's last backward within no_sync()?"
        if is_own
        else "something else exchanged them: was it registered on another model?"
    )
    return f"hook ignored: DDP gave it no gradients before optimizer.step(), and {why}"


def check_choice(check: str | None) -> None:
    """Refuse a value of `check=`.

    Raises:
        ConfigError: it is not one of CHOICES.
    """
    if check not in CHOICES:
        raise ConfigError(f"check={check!r}: allowed are None, 'first'")
