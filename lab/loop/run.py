"""Run: record a training loop of the user's own as `lab.train` records its."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from lab.distributed.comm import Sent
from lab.distributed.world import World
from lab.exchange.allreduce import NoExchange
from lab.loop.check import Checked
from lab.loop.setup import refuses_misuse, require_module, settings_of_run, world_of
from lab.measure.clock import Clock
from lab.measure.environment import source_hash
from lab.record.recorders import Recorder
from lab.record.schema import Certificate, read_record
from lab.settings.config import RunSettings, build, global_batch_size, load, settings_of
from lab.settings.errors import ConfigError
from lab.settings.names import of_all_ranks, resolved, run_name
from lab.sync.base import Exchanging
from lab.sync.ddp import LastGradient, waits_of_ddp
from lab.sync.gradsync import GradSync
from lab.training.assemble import count, require_alike
from lab.training.outcome import measured
from lab.training.recording import Curves, Recording, acquire_run_dir
from lab.training.run import failure_of
from lab.training.trainer import RecordedLoop


@dataclass
class RunStep:
    """The current optimizer step.

    Attributes: loss: this rank's loss, which you set before the step ends. None: not recorded.
    """

    loss: Tensor | float | None = None


class Run(Recording):
    """Record the run of a custom training loop, for lab.plot, lab.explain and lab.report.

        with lab.Run(study="mine", strategy="onebit", model=model, batch_size=64) as run:
            for inputs, targets in batches:
                with run.step() as step:
                    …
                    step.loss = loss
            run.evaluated(loss=…, accuracy=…)

    All ranks must do this together, after your program has created the process group. Rank 0 writes
    the files. The name of the run directory is made from the settings, and gets a number if it
    exists already.

    Args:
        study: the study that the run belongs to, a folder in `runs_dir`.
        model: the module that your loop calls, or a name for it. With a name, the record contains
            neither the model's size and code nor whether the ranks' replicas are equal.
        batch_size: samples per step: across all ranks, or per rank if `scaling` is "weak".
        strategy: a name for the gradient exchange. None: the strategy of `sync`.
        sync: the result of `lab.attach` or `lab.grad_sync`. With it, the run also records the bytes
            sent and whether the replicas are equal. None: the loop exchanges gradients itself.
        settings: other settings that differ between your runs, by name.
        data: name of the data set.
        task: name of the task.
        unit: what a sample is called, such as "image".
        scaling: "strong" or "weak".
        precision: "fp32", "bf16" or "fp16".
        repeat: number of this repeat, if you run the same settings several times. None: the first
            one without a finished run in the study.
        warmup_steps: number of first steps to leave out of statistics. None: until step times are
            steady.
        runs_dir: folder that contains all studies.
        recorder: where to send curves as well: a choice of recorder=, or your own Recorder.

    Raises:
        ConfigError: a setting is wrong or differs between ranks, the repeat has been run, or the
            run directory cannot be written.
    """

    @refuses_misuse
    def __init__(
        self,
        *,
        study: str,
        model: nn.Module | str,
        batch_size: int,
        strategy: str | None = None,
        sync: Checked | None = None,
        settings: Mapping[str, Any] | None = None,
        data: str | None = None,
        task: str | None = None,
        unit: str = "sample",
        scaling: str = "strong",
        precision: str = "fp32",
        repeat: int | None = None,
        warmup_steps: int | None = None,
        runs_dir: str | Path = "runs",
        recorder: str | Recorder = "local",
    ) -> None:
        if not isinstance(model, str):
            require_module("model", model)
        if not isinstance(cast(object, sync), Checked | None):
            raise ConfigError(
                f"sync={sync!r}: must be what lab.attach or lab.grad_sync returned, or None"
            )
        module = model if isinstance(model, nn.Module) else None
        device = next(module.parameters()).device if module else torch.device("cpu")
        world = world_of(None, device)
        if strategy == "none" and world.size > 1:
            _refuse_exchange(module, sync)
        config = settings_of_run(
            strategy,
            sync.settings if sync else None,
            model if isinstance(model, str) else _name(model),
            settings or {},
            world.size,
            study=study,
            batch_size=batch_size,
            scaling=scaling,
            precision=precision,
            repeat=repeat or 0,
            warmup_steps=warmup_steps,
            runs_dir=str(runs_dir),
        )
        composed: Any = OmegaConf.to_container(config, resolve=True)
        require_alike(world, of_all_ranks(composed))
        known: dict[str, Any] = {"model": config.model.name, "data": data, "task": task}
        if module:
            known |= {**count(module), "model_source": source_hash(module)}
        config.repeat = _repeat(world, config, known, repeat)
        arguments = [f"batch_size={batch_size}", *([f"repeat={repeat}"] if repeat else [])]
        arguments += [f"{key}={value}" for key, value in (settings or {}).items()]
        chosen: Any = recorder
        if isinstance(recorder, str):
            node = load([f"recorder={recorder}"]).recorder
            chosen = build(node) if node else None
        self.loop = self._loop = OwnLoop(config, world, module, sync)
        directory = acquire_run_dir(world, config, run_name(arguments, config.strategy, world.size))
        assert directory  # a new one is not done
        super().__init__(config, arguments, world, directory, unit=unit, **known)
        self.curves = Curves(chosen)
        self._is_open = self._in_step = False

    def __enter__(self) -> Self:
        self.open()
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
            self.directory.release()

    @contextmanager
    def step(self) -> Generator[RunStep]:
        """Time one optimizer step. To record the loss, set the step's `loss`.

        Raises: RuntimeError: the run is not open, or another step has not ended.
        """
        if self._in_step:
            raise RuntimeError("run.step(): called inside another step")
        if not self._is_open:
            raise RuntimeError("run.step(): no run is open; call it inside `with lab.Run(…)`")
        loop = self._loop
        loop.before_step()
        current = RunStep()
        before = loop.sent()
        self._in_step = True
        try:
            with loop.clock.step():
                loop.clock.next_phase("data")
                yield current
        finally:
            self._in_step = False
        loop.after_step(math.nan if current.loss is None else current.loss)
        loop.count_step(before, loop.sent())
        self.curves.after_step()

    @refuses_misuse
    def evaluated(self, *, loss: float, **metrics: float) -> None:
        """Record an evaluation. All ranks must pass the same values.

        Args: loss: loss on the test data. metrics: other metrics by name; accuracy is from 0 to 1.
        """
        self._loop.pause()
        progress, clock = self._loop.progress, self._loop.clock
        when = {"step": progress.step, "seconds": clock.total_seconds()}
        values = {"loss": loss, **metrics}
        result = {**when, **{name: _number(name, value) for name, value in values.items()}}
        progress.evaluations.append(result)
        self.curves.evaluated(result)

    def _finish(self) -> None:
        # Times of all ranks are gathered, and Gloo aborts a process that is sent too many.
        self.world.require_equal({"run.step(): number of steps": str(self._loop.progress.step)})
        self._loop.pause()
        self.curves.send()
        self.record = record = measured(self._loop, self.record, self.directory)
        if not self._loop.counts_payload:
            record.payload_bytes_per_step = record.messages_per_step = None
            record.across_bytes_per_step = None
        self.end()
        self.world.barrier()

    def _fail(self, error: BaseException) -> None:
        self.fail(failure_of(error, self.world.rank))
        if not self.directory.recorded_since(self.started_at.timestamp()):
            self.write()


def _name(model: nn.Module) -> str:
    """Return the class name of a model, without what torch wraps around it."""
    for wrapper in ("_orig_mod", "module"):
        model = getattr(model, wrapper, model)
    return type(model).__name__


def _refuse_exchange(model: nn.Module | None, sync: Checked | None) -> None:
    """Refuse a run of strategy "none", to which others are compared, that exchanges gradients."""
    of_ddp = any(isinstance(module, DDP) for module in (model.modules() if model else ()))
    if sync or of_ddp:
        what = "sync=" if sync else "DistributedDataParallel"
        raise ConfigError(
            f"strategy=none: {what} exchanges gradients; to measure what exchanges cost, record a "
            "loop without it, in which each rank trains on its own"
        )


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # whatever has one: a tensor, a number
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"evaluated({name}={value!r}): must be one number") from None


def _repeat(world: World, config: DictConfig, known: Mapping[str, Any], given: int | None) -> int:
    """Return the number of a run among those of the same settings, and `known` facts of a record.

    It is the same on all ranks. ConfigError: the `given` one has been run.
    """
    answer = ""
    if world.rank == 0:
        folder = Path(config.runs_dir) / config.study
        axes = {key: config[key] for key in ("strategy", "scaling")}
        axes |= {"world_size": world.size, "batch_size": global_batch_size(config, world.size)}
        done = _repeats_done(folder, config, {**known, **axes})
        free = next(number for number in itertools.count() if number not in done)
        answer = str(free if given is None else given)
        if given in done:
            answer = (
                f"repeat={given}: {done[given]} is a finished run of the same settings; leave out "
                f"repeat=, or set repeat={free}"
            )
    answer = world.broadcast_text(answer)
    if not answer.isdecimal():
        raise ConfigError(answer)
    return int(answer)


def _repeats_done(folder: Path, config: DictConfig, known: Mapping[str, Any]) -> dict[int, Path]:
    """Return the folders of finished runs of the same settings, by repeat."""
    own = _as_text(resolved(settings_of(config)))
    found: dict[int, Path] = {}
    for path in folder.glob("*/record.json"):
        try:
            record = read_record(path)
        except (OSError, ValueError):  # damaged, or of another version
            continue
        same = all(getattr(record, key) == value for key, value in known.items())
        if same and record.status == "done" and _as_text(record.settings) == own:
            found[record.repeat] = path.parent
    return found


def _as_text(settings: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in settings.items()}


class _Marker:
    """A hook on a model. Its copies, in copies and files of the model, do nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: object) -> None:
        if self._call:
            self._call(*args)

    def __reduce__(self) -> tuple[type[_Marker], tuple[()]]:
        return _Marker, ()


class Unchecked(Exchanging):
    """A sync whose replicas cannot be compared: the model is not known, or it is not the lab's."""

    @property
    def keeps_replicas_equal(self) -> bool:
        return False


class OwnLoop(RecordedLoop[Exchanging]):
    """One rank's loop of the user's own.

    Args:
        model: the module that trains; None: it is not known.
        sync: exchanges its gradients; None: it is not the lab's.
    """

    def __init__(
        self, config: DictConfig, world: World, model: nn.Module | None, sync: Checked | None
    ) -> None:
        module = model or nn.Module()
        exchange = sync.exchange if sync else NoExchange()
        shown = sync if sync and model is not None else Unchecked(exchange, world.comm)
        waits_in = () if isinstance(sync, GradSync) else waits_of_ddp(module)
        clock = Clock(world.device, False, waits_in)
        super().__init__(cast(RunSettings, config), world, module, shown, clock)
        self.lab_sync = sync
        self._hooks: list[RemovableHandle] = []
        self._last: LastGradient | None = None
        if model:  # mark phases
            self._hooks.append(model.register_forward_pre_hook(_Marker(self._forward_begins)))
            self._hooks.append(model.register_forward_hook(_Marker(self._forward_ends)))
        if sync:
            sync.clock = clock
        elif model:
            self._last = LastGradient(model)
            self._last.clock = clock

    def close(self) -> None:
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
    def counts_payload(self) -> bool:
        return self.lab_sync is not None

    @property
    def certificate(self) -> Certificate | None:
        return self.lab_sync.certificate if self.lab_sync else None

    def sent(self) -> Sent:
        """Return what this rank has sent so far; zeros if the lab does not know."""
        return self.lab_sync.sent() if self.lab_sync else (0, 0, 0)

    def after_step(self, loss: Tensor | float) -> None:
        if self._last:
            self._last.end_step()
        value = torch.as_tensor(loss, dtype=torch.float32, device=self.world.device)
        if value.numel() != 1:
            raise ValueError(f"step.loss: has shape {list(value.shape)}; must be one number")
        self.losses.append(value.detach().reshape(()).clone())
