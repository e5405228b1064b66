"""Run: record a training loop of the user's own as `lab.train` records its."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lab.distributed.comm import Comm, Sent
from lab.distributed.world import World
from lab.exchange.allreduce import NoExchange
from lab.exchange.base import Exchange
from lab.loop.setup import settings_of_run, world_of
from lab.measure.clock import Clock
from lab.measure.environment import source_hash
from lab.record.schema import Certificate
from lab.settings.config import Settings
from lab.settings.names import of_all_ranks, run_name
from lab.sync.ddp import LastGradient, waits_of_ddp
from lab.sync.gradsync import GradSync
from lab.training import outcome
from lab.training.assemble import count, global_batch_size, require_alike
from lab.training.identity import Recording, claim
from lab.training.run import failure_of
from lab.training.trainer import Measured, Progress, Synced


@dataclass
class Step:
    """One optimizer step under way.

    Attributes:
        loss: this rank's loss, to set before the step ends; None: not recorded.
    """

    loss: Tensor | float | None = None


class Run:
    """A run directory of a loop of one's own, which plot, explain and report read as any other.

        with lab.Run(study="mine", strategy="onebit", model=model, batch_size=64) as run:
            for inputs, targets in batches:
                with run.step() as step:
                    …
                    step.loss = loss
            run.evaluated(loss=…, accuracy=…)

    All ranks do this together, after the program has made its process group. Rank 0 writes; a rank
    that fails first writes that. The directory is named by the settings, and numbered until free.

    Args:
        study: folder under `runs_dir`.
        model: the module that trains, or a name for it. Only a module's size, code and equality
            over the ranks can be recorded.
        batch_size: samples of a step: of all ranks, or of each if `scaling` is "weak".
        strategy: names how gradients are exchanged; None: that of `sync`.
        sync: the result of `lab.attach` or `lab.grad_sync`; with it payloads are recorded, and that
            replicas are equal. None: the loop exchanges gradients by itself.
        settings: the loop's own settings that tell its runs apart, by name.
        data, task, unit: names, for the record; a unit is that of one sample.
        scaling: "strong" or "weak".
        precision: "fp32", "bf16" or "fp16".
        repeat: which repetition of the same settings this is.
        warmup_steps: first steps that statistics leave out; None: until steady.

    Raises:
        ConfigError: a wrong setting, one that another rank has differently, or a directory that
            cannot be written.
    """

    def __init__(
        self,
        *,
        study: str,
        model: nn.Module | str,
        batch_size: int,
        strategy: str | None = None,
        sync: LabSync | None = None,
        settings: Mapping[str, Any] | None = None,
        data: str | None = None,
        task: str | None = None,
        unit: str = "sample",
        scaling: str = "strong",
        precision: str = "fp32",
        repeat: int = 0,
        warmup_steps: int | None = None,
        runs_dir: str | Path = "runs",
    ) -> None:
        module = model if isinstance(model, nn.Module) else None
        device = next(module.parameters()).device if module else torch.device("cpu")
        self._world = world_of(None, device)
        config = settings_of_run(
            strategy,
            sync.settings if sync else None,
            model if isinstance(model, str) else _name(model),
            settings or {},
            self._world.size,
            study=study,
            batch_size=batch_size,
            scaling=scaling,
            precision=precision,
            repeat=repeat,
            warmup_steps=warmup_steps,
            runs_dir=str(runs_dir),
        )
        composed: Any = OmegaConf.to_container(config, resolve=True)
        require_alike(self._world, of_all_ranks(composed))
        arguments = [f"batch_size={batch_size}", *([f"repeat={repeat}"] if repeat else [])]
        arguments += [f"{key}={value}" for key, value in (settings or {}).items()]
        self._sync = sync
        self._is_open = self._in_step = False
        self._loop = OwnLoop(config, self._world, module, sync)
        directory = claim(
            self._world, config, run_name(arguments, config.strategy, self._world.size)
        )
        assert directory  # a new one is not done
        self._recording = Recording(
            config,
            arguments,
            self._world,
            directory,
            model=config.model.name,
            data=data,
            task=task,
            unit=unit,
            **({**count(module), "model_source": source_hash(module)} if module else {}),
        )

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._recording.directory.path

    def __enter__(self) -> Self:
        if self._world.rank == 0:
            self._recording.open(first_step=0)
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        try:
            if error is not None:
                self._fail(error)
                return
            try:
                self._finish()
            except Exception as late:  # replicas that differ, or a full disk
                self._fail(late)
                raise
        finally:
            self._loop.close()
            self._recording.directory.release()

    @contextmanager
    def step(self) -> Generator[Step]:
        """Time one optimizer step; set its `loss` to have it recorded.

        Raises:
            RuntimeError: the run has not begun or has ended, or another step is under way.
        """
        if not self._is_open or self._in_step:
            within = "another step" if self._in_step else "no run; it belongs in `with lab.Run(…)`"
            raise RuntimeError(f"run.step() within {within}")
        loop = self._loop
        loop.before_step()
        current = Step()
        before = self._sent()
        self._in_step = True
        try:
            with loop.clock.step():
                loop.clock.next_phase("data")
                yield current
        finally:
            self._in_step = False
        loss = math.nan if current.loss is None else current.loss
        loop.after_step(loss, before, self._sent())

    def evaluated(self, *, loss: float, **metrics: float) -> None:
        """Record an evaluation after the last step: the same values on all ranks.

        Args:
            loss: of the test samples. metrics: others by name; accuracy is a share of 1.
        """
        self._loop.pause()
        when = {"step": self._loop.progress.step, "seconds": self._loop.clock.total_seconds()}
        self._loop.progress.evaluations.append({**when, "loss": float(loss), **metrics})

    def _sent(self) -> Sent:
        return self._sync.comm.traffic.so_far() if self._sync else (0, 0, 0)

    def _finish(self) -> None:
        self._loop.pause()
        recording = self._recording
        record = outcome.measured(self._loop, recording.record, recording.directory)
        if self._sync is None:
            record.payload_bytes_per_step = record.messages_per_step = None
            record.across_bytes_per_step = None
        recording.record = record
        recording.end(self._loop)
        self._world.barrier()

    def _fail(self, error: BaseException) -> None:
        recording = self._recording
        recording.fail(failure_of(error, self._world.rank), self._loop)
        if not recording.directory.recorded_since(recording.started_at.timestamp()):
            recording.write()


def _name(model: nn.Module) -> str:
    """Return the class name of a model, without what torch wraps around it."""
    for wrapper in ("_orig_mod", "module"):
        model = getattr(model, wrapper, model)
    return type(model).__name__


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


class OwnLoop(Measured[Synced]):
    """One rank's loop of the user's own.

    Args:
        model: the module that trains; None: it is not known.
        sync: exchanges its gradients; None: it is not the lab's.
    """

    def __init__(
        self, config: DictConfig, world: World, model: nn.Module | None, sync: LabSync | None
    ) -> None:
        module = model or nn.Module()
        shown: Synced = sync or Unchecked()
        if model is None and sync:
            shown = Unchecked(sync.every, sync.exchange)
        batch_size = global_batch_size(config, world.size)
        clock = Clock(
            world.device, False, () if isinstance(sync, GradSync) else waits_of_ddp(module)
        )
        settings = cast(Settings, config)
        super().__init__(settings, world, module, shown, batch_size, Progress(0), clock)
        self._lab_sync = sync
        self._hooks: list[RemovableHandle] = []
        self._last: LastGradient | None = None
        self._observe(model, sync)

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

    def after_step(self, loss: Tensor | float, before: Sent, after: Sent) -> None:
        """Note a step's loss, and what it sent."""
        value = torch.as_tensor(loss, dtype=torch.float32, device=self.world.device)
        if self._last:
            self._last.end_step()
        self.losses.append(value.detach().clone())
        self.count_step(before, after)
