"""Run: record a training loop of the user's own as `lab.train` records its."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lab.distributed.comm import Sent
from lab.loop.identity import identity, settings_of
from lab.loop.measured import LabSync, OwnLoop
from lab.loop.world import world_of
from lab.record.run_directory import RunDirectory
from lab.settings.config import ConfigError
from lab.settings.names import of_all_ranks, run_name
from lab.settings.secrets import kept
from lab.training import outcome
from lab.training.assemble import require_alike
from lab.training.run import failure_of


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
        config = settings_of(
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
        self._began, self._started_at = time.monotonic(), datetime.now(UTC)
        self._directory = self._claim(arguments)
        self._record = identity(
            config,
            arguments,
            self._directory.path.name,
            self._world,
            module,
            data=data,
            task=task,
            unit=unit,
            started_at=self._started_at.isoformat(),
        )

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._directory.path

    def __enter__(self) -> Self:
        if self._world.rank == 0:
            first = {"first_step": 0, "world_size": self._world.size, "launch": None}
            first["started_at"] = self._record.started_at
            self._directory.begin_attempt(first)
            own = kept(OmegaConf.to_container(self._loop.config))
            self._directory.write_config(OmegaConf.to_yaml(own))
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
            self._directory.release()

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
        after = self._sent()
        loop.after_step(
            math.nan if current.loss is None else current.loss,
            map(operator.sub, after, before),
        )

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
        self._record = outcome.measured(self._loop, self._record, self._directory)
        outcome.note_end(self._loop, self._record, None)
        if self._sync is None:
            self._record.payload_bytes_per_step = self._record.messages_per_step = None
            self._record.across_bytes_per_step = None
        if self._world.rank == 0:
            self._write()
            print(outcome.summary(self._record, self.path))
        self._world.barrier()

    def _fail(self, error: BaseException) -> None:
        failure = failure_of(error, self._world.rank)
        outcome.note_progress(self._loop, self._record)
        self._record.end(failure.status, failure.error, failure.traceback)
        if not self._directory.recorded_since(self._started_at.timestamp()):
            self._write()

    def _write(self) -> None:
        self._record.attempts = self._directory.attempts()
        self._record.duration_s = time.monotonic() - self._began
        self._directory.write_record(self._record)

    def _claim(self, arguments: list[str]) -> RunDirectory:
        """Claim a free directory on rank 0, and tell the others its path."""
        config, world, answer, claimed = self._loop.config, self._world, "", None
        if world.rank == 0:
            parent = Path(config.runs_dir).absolute() / config.study
            name = run_name(arguments, config.strategy, world.size)
            try:
                claimed = RunDirectory.claim(parent, None, name, None)
                answer = f"at {claimed.path}"
            except ValueError as error:
                answer = f"no {error}"
        verdict, _, text = world.broadcast_text(answer).partition(" ")
        if verdict == "no":
            raise ConfigError(text)
        return claimed or RunDirectory(Path(text))


def _name(model: nn.Module) -> str:
    """Return the class name of a model, without what torch wraps around it."""
    for wrapper in ("_orig_mod", "module"):
        model = getattr(model, wrapper, model)
    return type(model).__name__
