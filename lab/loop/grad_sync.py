"""GradSync in a training loop of the user's own, without DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lab.distributed import replicas
from lab.distributed.worker import make_worker
from lab.distributed.world import World
from lab.exchange.base import Exchange
from lab.loop.check import FORGOT_FINISH, LoopCheck, is_on
from lab.loop.settings import compose
from lab.loop.world import world_of
from lab.record.schema import Certificate
from lab.settings.config import ConfigError, build
from lab.sync.base import SyncParts
from lab.sync.gradsync import GradSync
from lab.sync.owner import KEY, NonfiniteGuard, Owner, Scaler, require_state
from lab.training.alike import exchanged_alike
from lab.training.assemble import admitted, require_alike, require_like_gpus


class LoopSync(GradSync):
    """A GradSync for a loop that knows nothing of it but

        with grad_sync(model) as sync:
            for …:
                loss(model(inputs)).backward()
                sync.finish()
                optimizer.step()

    On entry all ranks get rank 0's weights and buffers. Micro-batches before a step's last one go
    into `with sync.accumulate():`. A parameter that backward does not reach on this rank has the
    mean of the other ranks' gradients after `finish`; one that no rank has reached has none, as
    with DistributedDataParallel(find_unused_parameters=True).

    Attributes:
        settings: the composed settings that made the sync.
        check: examines the first exchanges; None: nothing does. Set before the loop.
    """

    check: LoopCheck | None = None

    def __init__(
        self, parts: SyncParts, world: World, settings: Mapping[str, Any], scaler: Scaler | None
    ) -> None:
        super().__init__(parts)
        self.divides_loss = False  # the loop's loss is what it is
        self.settings = settings
        self._model, self._world = parts.model, world
        self._guard = NonfiniteGuard(self.exchange, scaler)

    @property
    def certificate(self) -> Certificate | None:
        """Return the finding of check="first"; None: nothing yet, or it is off."""
        return self.check.certificate if self.check else None

    def __enter__(self) -> Self:
        replicas.broadcast_state(self._model, self._world)
        super().__enter__()
        self._armed = True
        if self.check:
            self.check.begin()
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        super().__exit__()
        if kind is None:  # after an error, an exchange may wait for a rank that is lost
            self.worker.close()
        if self.check:
            self.check.close() if kind is None else self.check.abandon()

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """Enclose forward and backward of a micro-batch that is not its step's last."""
        self._armed = False
        yield
        self._armed = True

    def finish(self) -> Tensor | None:
        """Leave the mean of all ranks' gradients in `grad`; call it once, after a step's backward.

        Raises:
            FloatingPointError: see NonfiniteGuard.
            CertificateError: check="first" has found a fault.
            Exception: the first error of an exchange.
        """
        if self.clock:
            self.clock.next_phase("exchange")
        finite = super().finish()
        if self.clock:
            self.clock.next_phase("update")
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        if self.loss_scale != 1.0:
            torch._foreach_mul_(gradients, self.loss_scale)
        self._guard.end_step(gradients, finite)
        if self.check:
            self.check.exchanged(self.loss_scale)
        return finite

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to save beside the model; every rank has its own."""
        exchange = {f"exchange.{key}": v for key, v in self.exchange.state_dict().items()}
        step = {"step": {"step": torch.tensor(self.step)}}
        return {**super().state_dict(), **exchange, **step, KEY: self._owner.mark()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict` of the same rank among as many ranks.

        Raises:
            ValueError: it is of another exchange, or see Owner.check.
        """
        require_state(state, "step")
        prefix = "exchange."
        kept = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        self._owner.check(state.get(KEY), kept)
        self.exchange.resume(kept, self._world.device)
        super().load_state_dict({"order": state.get("order", {})})
        self.step = int(state["step"]["step"])

    @property
    def _owner(self) -> Owner:
        comm, made_from = self.comm, self.settings["exchange"]
        return Owner(self._model, self.exchange, made_from, comm.rank, comm.size)

    def _submit_next(self) -> None:
        if not self._exchanged:
            self.loss_scale = self._guard.begin_step()
        super()._submit_next()


def grad_sync(
    model: nn.Module,
    strategy: str = "onebit",
    *,
    group: dist.ProcessGroup | None = None,
    scaler: Scaler | None = None,
    check: str | None = "first",
    certificate: str | Path | None = None,
    **overrides: Any,
) -> LoopSync:
    """Average the gradients of `model` over the ranks, in a loop of one's own without DDP.

    Args:
        model: on its device. Gradients of any real or complex dtype are exchanged by methods that
            only add; those that compress take float32, bfloat16, float16 and complex64.
        strategy: a choice of strategy= or exchange= that averages gradients in every step.
        group: the ranks; None: all that a launcher started. The default process group is made if
            the program has not done so. All its ranks call this together.
        scaler, check, certificate: see `lab.attach`.
        overrides: settings by dotted key; also `overlap` and `bucket_mb`, which a strategy sets.

    Raises:
        ConfigError: a setting, or a model, that is not supported, or that is another on some rank.
    """
    looks = is_on(check)
    config = compose(strategy, overrides, ("overlap", "bucket_mb"))
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("DistributedDataParallel: exchanges gradients itself; use lab.attach")
    exchange: Exchange = build(config.exchange)
    parameters = admitted(model, exchange)
    device = next(iter(parameters.values())).device
    world = world_of(group, device, config.exchange_timeout_s)
    settings: Any = OmegaConf.to_container(config, resolve=True)
    require_alike(world, exchanged_alike(settings, model))
    comm = world.comm
    worker = make_worker(config.overlap, device, comm.backend, exchange.asynchronous(comm))
    parts = SyncParts(model, model, exchange, comm, worker, config.overlap, config.bucket_mb)
    require_like_gpus(world, exchange)
    try:
        sync = LoopSync(parts, world, settings, scaler)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if looks:
        sync.check = LoopCheck(model, sync, world, settings, certificate, FORGOT_FINISH)
    return sync
