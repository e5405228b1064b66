"""Mistakes in a loop of the user's own: check="first", and ranks that others wait for."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from lab.certificate.check import Observer
from lab.certificate.examination import About, CertificateError, unchecked
from lab.distributed.torch_comm import TorchComm
from lab.distributed.world import World
from lab.exchange.layout import travelling
from lab.record.schema import Certificate
from lab.settings.errors import ConfigError
from lab.settings.storage import write_json
from lab.sync.base import AFTER_UPDATES, BEFORE_UPDATES, Exchanging
from lab.sync.ddp import HookState
from lab.sync.gradsync import GradSync
from lab.sync.owner import Owner
from lab.training.run import LOST_PEER, TIMEOUT

GRACE_S = 5.0  # in which others that wait for a lost rank notice it, too
FORGOT_FINISH = "not exchanged: optimizer.step() comes before sync.finish()"
FORGOT_HOOK = (
    "hook ignored: DDP gave it no gradients before optimizer.step(); was the last backward of "
    "the step inside no_sync(), was a parameter frozen or unused (which needs "
    "find_unused_parameters=True), or was the hook registered on another model?"
)
COPY_TRAINS = (
    "hook ignored: backward reached no parameter of this model, because a copy of it is being "
    "trained; attach or sync the copy instead, or load its weights into this model"
)
MEANT = "if ranks are meant to differ, use check=None"


class Checked(Exchanging):
    """A sync, or a hook's state, in a loop.

    Attributes:
        world: the ranks, in process groups of its own.
        settings: the composed settings that made it.
        check: examines the first exchanges; None: nothing does. Set before the loop.
        is_closed: its process groups are no more.
        num_loads: states loaded so far.
    """

    world: World
    settings: Mapping[str, Any]
    check: LoopCheck | None = None
    num_loads = 0
    is_closed = False
    _model: nn.Module

    @property
    def certificate(self) -> Certificate | None:
        """The finding of check="first"; None: nothing yet, or it is off."""
        return self.check.certificate if self.check else None

    def close(self) -> None:
        """Exchange no more, and leave the process groups that this exchange has made.

        All ranks must call this. Otherwise, the groups last until the program ends, which matters
        if it makes many exchanges in turn.
        """
        if self.check:
            self.check.abandon()
        is_open, self.is_closed = not self.is_closed, True
        if is_open and dist.is_initialized():  # else the program has left all groups
            assert isinstance(self.world.comm, TorchComm)
            self.world.comm.leave()
            dist.destroy_process_group(self.world.control)

    @property
    def _owner(self) -> Owner:
        comm, made_from = self.comm, self.settings["exchange"]
        return Owner(self._model, self.exchange, made_from, comm.rank, comm.size)


_syncs = weakref.WeakValueDictionary[int, Checked]()


def remember(sync: Checked) -> None:
    """Let `syncs` list this one, as long as anything else holds it."""
    _syncs[id(sync)] = sync


def syncs() -> list[Checked]:
    """List what loops of this process exchange by."""
    return [sync for held in _syncs.valuerefs() if (sync := held()) is not None]


class LoopCheck:
    """Examination of the first exchanges of a loop.

    It also looks at the optimizers of the model, before each update, because a loop may forget the
    exchange. An optimizer that is given a closure is looked at whenever that has run.

    Args:
        file: where rank 0 writes the certificate; None: nowhere.
        forgotten: describes an update without an exchange.

    Attributes: certificate: the result, once there is one.

    Raises: ConfigError: the file's folder does not exist, or the file is a folder.
    """

    def __init__(self, sync: Checked, file: str | Path | None, forgotten: str) -> None:
        self._file = Path(file) if file else None
        if self._file and not self._file.absolute().parent.is_dir():
            raise ConfigError(f"certificate={file}: its folder does not exist")
        if self._file and self._file.is_dir():
            raise ConfigError(f"certificate={file} is a folder; give the path of a file in it")
        self.certificate: Certificate | None = None
        self._sync, self._world = sync, (world := sync.world)
        self._about = About(
            world.gather,
            size=world.size,
            num_launched=dist.get_world_size() if dist.is_initialized() else world.size,
            backend=world.comm.backend,
            name=f"exchange={type(sync.exchange).__name__}",
            error_bound=sync.exchange.error_bound,
            settings=sync.settings["exchange"],
            nodes=world.comm.nodes,
            exchange=sync.exchange,
        )
        self._forgotten = forgotten
        self._observer: Observer | None = None
        self._has_exchanged = False
        # The gradients, and their versions, of updates since the last exchange, by parameter's id.
        self._used: dict[int, tuple[Tensor, int]] = {}
        self._is_idle = False  # no gradient of this rank had grown before the last exchange

    def begin(self) -> None:
        """Look at the exchanges from now on."""
        exchange = self._sync.exchange
        if self._world.size == 1:
            self._end(unchecked("one rank has nothing to exchange"))
        elif exchange.delivers != "mean":
            why = f"exchange={type(exchange).__name__} produces a {exchange.delivers}, not a mean"
            self._end(unchecked(why))
        else:
            self._observer = Observer(self._sync._model, self._sync, self._about)
            BEFORE_UPDATES.add(self._before_update)
            AFTER_UPDATES.add(self._after_update)

    def exchanged(self, kept_factor: float, joined: bool = False) -> None:
        """Judge an exchange that has ended.

        Args:
            kept_factor: by which to multiply errors kept, to have them in units of the gradients.
            joined: this rank has no more batches, and only takes part for the others.

        Raises: CertificateError: names what is wrong.
        """
        if (observer := self._observer) is None:
            return
        self._has_exchanged, self._used = True, {}
        self._is_idle = not observer.watch.grown and not joined
        seen = observer.seen(1.0, kept_factor)
        if joined:  # what is left in `grad` was not sent
            none = torch.zeros_like(seen.reached)
            seen = replace(
                seen, own=torch.zeros_like(seen.own), sent=seen.sent - seen.own, reached=none
            )
            seen.judged.zero_()
        try:
            observer.add(seen)
        except CertificateError as error:
            self._end(error.certificate)
            raise
        if observer.examination.is_done:
            self.close()

    def close(self) -> None:
        if self._observer:
            self._end(self._observer.examination.certificate())

    def abandon(self) -> None:
        """Look no more, after an error."""
        if self._observer:
            self._observer.close()
            BEFORE_UPDATES.remove(self._before_update)
            AFTER_UPDATES.remove(self._after_update)
            self._observer = None

    def _end(self, certificate: Certificate) -> None:
        self.certificate = certificate
        self.abandon()
        if self._world.rank:
            return
        if self._file:
            try:
                write_json(self._file, asdict(certificate))
            except OSError as error:  # no reason to end a training
                print(f"certificate={self._file}: cannot be written: {error}", file=sys.stderr)
        if certificate.holds and self._world.size > 1:  # an exception says it otherwise
            print(certificate.line, flush=True)

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Look at an update, or have it looked at after its closure: gradients are made there."""
        _, *given = args  # the optimizer itself comes first
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            if _is_torchs(optimizer):
                self._refuse_unexchanged(optimizer)
            return None

        @functools.wraps(closure)
        def looked_at(*arguments: Any, **more: Any) -> Any:
            loss = closure(*arguments, **more)
            self._refuse_unexchanged(optimizer)
            return loss

        if given:
            return (args[0], looked_at, *given[1:]), kwargs
        return args, {**kwargs, "closure": looked_at}

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        """Look at an update by a `step` of the user's own, which may exchange gradients itself."""
        if not _is_torchs(optimizer):
            self._refuse_unexchanged(optimizer)

    def _refuse_unexchanged(self, optimizer: Optimizer) -> None:
        """Raise CertificateError for an update by gradients that no exchange has seen."""
        if (observer := self._observer) is None:
            return
        watch, updated = observer.watch, [p for g in optimizer.param_groups for p in g["params"]]
        grown = {id(watch.parameters[name]) for name in watch.grown}
        ours = {*map(id, watch.parameters.values())}.intersection(map(id, updated))
        unsent = [p for p in updated if id(p) in ours and not self._was_sent(p)]
        text = ""
        if any(_has_values(p) for p in updated if id(p) in grown) or any(map(_has_values, unsent)):
            text = self._in_two_models() or f"{self._forgotten}; {MEANT}"
        elif self._is_idle and trains_copy(self._sync, optimizer):
            text = COPY_TRAINS
        if text:
            try:
                observer.examination.fail("exchanged", text)
            except CertificateError as error:
                self._end(error.certificate)
                raise

    def _was_sent(self, parameter: nn.Parameter) -> bool:
        """Tell whether an exchange came before this update, and no other with another gradient.

        A loop may set `grad` itself, which no hook sees, and forget to exchange that.
        """
        if (gradient := parameter.grad) is None:
            return True
        used = self._used.setdefault(id(parameter), (gradient, gradient._version))
        return self._has_exchanged and used[0] is gradient and used[1] == gradient._version

    def _in_two_models(self) -> str:
        """Say which parameter another sync has exchanged as well; empty if none has."""
        assert self._observer
        others = [sync for sync in syncs() if sync is not self._sync and sync.step]
        theirs = {id(p) for other in others for p in other._model.parameters()}
        ours = self._observer.watch.parameters
        shared = [name for name, parameter in ours.items() if id(parameter) in theirs]
        if not shared or len(shared) == len(ours):  # all are: this model was attached before
            return ""
        return (
            f"{shared[0]}: is in two models that both exchange its gradient; combine them, as in "
            "nn.ModuleList([first, second]), and attach or sync the combined model"
        )


def trains_copy(sync: Checked, optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates what looks like a sync's model, but nobody exchanges."""
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    ours = [p for p in sync._model.parameters() if p.requires_grad and p.numel()]
    alike = sorted(tuple(p.shape) for p in ours) == sorted(tuple(p.shape) for p in updated)
    if not alike or not any(map(_has_values, updated)):
        return False
    exchanged = {id(p) for sync in syncs() for p in sync._model.parameters()}
    return exchanged.isdisjoint(map(id, updated))


class CopyWatch:
    """Warns once of a copy that trains while its model rests, also after check="first" has ended.

    An optimizer is looked at only after a step in which one parameter's gradient did not change.
    """

    def __init__(self, sync: Checked, parameters: Iterable[nn.Parameter]) -> None:
        self._sync = weakref.ref(sync)
        self._parameter = next(parameter for parameter in parameters if parameter.numel())
        self._last = self._gradient()
        self._has_warned = False

    def begin(self) -> None:
        """Look at the gradient before it is exchanged."""
        self.close()
        (last, version), (now, now_version) = self._last, self._gradient()
        is_idle = now is None or (now is last and now_version == version)
        if is_idle and not self._has_warned:
            BEFORE_UPDATES.add(self._before_update)

    def end(self) -> None:
        self._last = self._gradient()

    def close(self) -> None:
        BEFORE_UPDATES.remove(self._before_update)

    def _gradient(self) -> tuple[Tensor | None, int]:
        gradient = self._parameter.grad
        return gradient, 0 if gradient is None else gradient._version

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        sync = self._sync()
        if sync and not self._has_warned and trains_copy(sync, optimizer):
            self._has_warned = True
            warnings.warn_explicit(COPY_TRAINS, UserWarning, __name__, 0)  # shows no line of source


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).step.__module__.startswith("torch.")


def _has_values(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    return gradient is not None and bool(travelling(gradient, parameter).any())


def follow(check: LoopCheck, state: HookState) -> None:
    """Have a check look at what DDP's hook exchanges, once DDP has put it into `grad`."""

    def arrived(queued: int = 0) -> None:
        if queued > 1:
            check.exchanged(state.loss_scale)
            return
        try:  # behind what DDP itself queues now
            Variable._execution_engine.queue_callback(lambda: arrived(queued + 1))
        except RuntimeError:  # no backward: this rank is in ddp.join()
            check.exchanged(state.loss_scale, joined=True)

    state.after_exchange = arrived
    check.begin()


def is_on(check: str | None) -> bool:
    """Return whether `check=` asks for an examination; ConfigError: it is no choice."""
    if check not in (None, "none", "first"):
        raise ConfigError(f"check={check!r}: allowed: 'first', 'none', None")
    return check == "first"


@contextmanager
def naming_stalled(sync: Checked) -> Iterator[None]:
    """Name the ranks that others wait for, if a wait in Gloo fails in this context.

    Raises:
        RuntimeError: says who has stopped, and after how many steps.
    """
    try:
        yield
    except RuntimeError as error:
        _refuse_stalled(str(error).lower(), sync)
        raise


def _refuse_stalled(text: str, sync: Checked) -> None:
    """Raise the error of ranks that stopped, if there are any.

    Ranks that wait in the same step meet in the store. As each step needs all ranks, those that do
    not come have taken as many steps as this one.
    """
    is_late = any(word in text for word in TIMEOUT)
    if "gloo" not in text or not (is_late or any(word in text for word in LOST_PEER)):
        return
    try:
        absent = sync.world.meet(f"stalled/{sync.step}", {}, GRACE_S)
    except RuntimeError:  # the store has ended with its rank
        absent = "another rank"
    if not absent:
        return
    limit = sync.settings["exchange_timeout_s"]
    why = (
        f"is only slow, raise exchange_timeout_s={limit:g}" if is_late else "failed, see its error"
    )
    cure = "call finish() without backward" if isinstance(sync, GradSync) else "use ddp.join()"
    raise RuntimeError(
        f"{absent} stopped after {sync.step} steps, but rank {sync.comm.rank} continues; all ranks "
        "must run the same number of steps; give each rank the same number of batches "
        f"(drop_last=True), or, on a rank without further batches, {cure}; if {absent} {why}"
    ) from None
