"""The measurements of a user's own loop, as lab.training.outcome reads them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lab.distributed.comm import Comm
from lab.distributed.world import World
from lab.exchange.allreduce import NoExchange
from lab.exchange.base import Exchange
from lab.measure.clock import Clock
from lab.measure.memory import Memory
from lab.measure.statistics import least_warmup
from lab.record.certificate import Certificate
from lab.settings.config import Settings
from lab.sync.ddp import LastGradient, waits_of_ddp
from lab.sync.gradsync import GradSync
from lab.training.assemble import global_batch_size
from lab.training.outcome import Synced
from lab.training.trainer import Losses, Progress


class LabSync(Synced, Protocol):
    """A result of `lab.attach` or `lab.grad_sync`."""

    @property
    def comm(self) -> Comm: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def certificate(self) -> Certificate | None: ...

    clock: Clock | None


@dataclass(frozen=True)
class Unchecked:
    """A sync whose replicas cannot be compared: the model is not known, or it is not the lab's."""

    every: int = 1
    exchange: Exchange = field(default_factory=NoExchange)
    keeps_replicas_equal: bool = False

    @property
    def settled_at(self) -> int | None:
        return self.exchange.settled_at


class OwnLoop:
    """One rank's loop; see lab.training.loop.Loop.

    Args:
        model: the module that trains; None: it is not known.
        sync: exchanges its gradients; None: it is not the lab's.
    """

    first_step = 0
    turns = None  # nothing else trains in between

    def __init__(
        self, config: DictConfig, world: World, model: nn.Module | None, sync: LabSync | None
    ) -> None:
        self.config, self.world = cast(Settings, config), world
        self.model = model or nn.Module()
        self._lab_sync = sync
        self.sync: Synced = sync or Unchecked()
        if model is None and sync:
            self.sync = Unchecked(sync.every, sync.exchange)
        self.batch_size = global_batch_size(config, world.size)
        waits_in = () if isinstance(sync, GradSync) else waits_of_ddp(self.model)
        self.clock, self.memory = Clock(world.device, False, waits_in), Memory(world.device)
        self._hooks: list[RemovableHandle] = []
        self._last: LastGradient | None = None
        self._observe(model, sync)
        self.losses, self.progress = Losses(), Progress(total_steps=0)
        self.traffic = array("q")

    def _observe(self, model: nn.Module | None, sync: LabSync | None) -> None:
        """Let hooks of the model and the sync mark phases, and when gradients are ready."""
        if model:
            self._hooks.append(model.register_forward_pre_hook(self._forward_begins))
            self._hooks.append(model.register_forward_hook(self._forward_ends))
        if sync:
            sync.clock = self.clock
        elif model:
            self._last = LastGradient(model)
            self._last.clock = self.clock

    def close(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        if self._last:
            self._last.close()

    def _forward_begins(self, model: nn.Module, _inputs: object) -> None:
        if model.training and not torch.compiler.is_compiling():
            self.clock.next_phase("forward")

    def _forward_ends(self, model: nn.Module, _inputs: object, _outputs: object) -> None:
        if model.training and not torch.compiler.is_compiling():
            self.clock.next_phase("backward")  # with the loss

    @property
    def total_steps(self) -> int:
        """Steps so far: the loop alone knows when it ends."""
        return self.progress.step

    @property
    def certificate(self) -> Certificate | None:
        """Return the finding of check="first" of `sync`."""
        return self._lab_sync.certificate if self._lab_sync else None

    def before_step(self) -> None:
        """Begin to measure memory, once warm-up is over. The clock's step comes next."""
        if self.progress.step >= least_warmup(self.config.warmup_steps):
            self.memory.resume()

    def after_step(self, loss: Tensor | float, sent: Iterable[int]) -> None:
        """Note a step's loss, and what it sent (see `Sent`)."""
        value = torch.as_tensor(loss, dtype=torch.float32, device=self.world.device)
        if self._last:
            self._last.end_step()
        self.losses.append(value.detach().clone())
        self.traffic.extend(sent)
        self.progress.step += 1
        self.progress.samples += self.batch_size

    def pause(self) -> None:
        """Wait for the device; the time until the next step is not the loop's."""
        self.clock.pause()
        self.memory.pause()
        self.losses.read_last()
