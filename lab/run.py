"""One run from its settings to its record: the composition root."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from tqdm import tqdm

from lab import checkpoint, report
from lab.config import ConfigError, build, run_name, variant
from lab.distributed import replicas
from lab.distributed.watch import Failure, Watch
from lab.distributed.worker import make_worker
from lab.distributed.world import World, end_process
from lab.record.run_directory import RunDirectory
from lab.trainer import Trainer

DEFAULT_EPOCHS = 30
RECORD_WAIT_S = 5.0  # what rank 0 has to record a failure before another rank does it
SIGTERM_EXIT = 128 + 15


class Run:
    """One rank of one run.

    Args:
        config: see lab.config.
        arguments: the command line that made it; names the run.
        world: this rank among the others.
        directory: claimed for this run.
    """

    def __init__(
        self, config: DictConfig, arguments: list[str], world: World, directory: RunDirectory
    ) -> None:
        self.config, self.arguments, self.world = config, arguments, world
        self.directory = directory
        self.began = time.monotonic()
        weak = config.scaling == "weak"
        self.batch_size: int = config.batch_size * (world.size if weak else 1)
        self.record = self._identity()
        self.watch = Watch(
            world.store, world.rank, world.size, config.exchange_timeout_s, self._end_process
        )

    def execute(self) -> int:
        """Build, train, evaluate, record. The process's exit code.

        Raises:
            ConfigError: a setting that proved wrong with data, devices and files at hand. The run
                had not begun and leaves nothing behind.
        """
        try:
            self._build()
            if self.world.rank == 0:
                self._open_records()
            self.watch.listen_to_signals()
            self._train()
            self.record |= report.measurements(self)
        except ConfigError as error:
            self.watch.publish(Failure("failed", str(error)))
            self.directory.discard_if_empty()
            raise
        except (Exception, KeyboardInterrupt) as error:
            self._end_process(self.watch.publish(report.classify(error, self.world.rank)))
        if self.world.rank == 0:
            self._write_record()
            print(report.summary(self.record, self.directory.path))
        self.world.barrier()
        self.watch.close()
        self.worker.close()
        return SIGTERM_EXIT if self.record["status"] == "interrupted" else 0

    def _build(self) -> None:
        config, world = self.config, self.world
        seed = config.seed + config.repeat
        _seed(seed, config.deterministic)
        self.data = build(config.data, seed=seed, device=world.device)
        self.model = self._build_model()
        self.worker = make_worker(config.overlap, world.device, world.backend)
        self.watch.worker = self.worker
        self.sync = build(
            config.sync,
            model=torch.compile(self.model) if config.compile else self.model,
            exchange=build(config.exchange),
            comm=world.comm,
            worker=self.worker,
            overlap=config.overlap,
            bucket_mb=config.bucket_mb,
        )
        self.recorder = build(config.recorder) if "_target_" in config.recorder else None
        optim = build(config.optim, batch_size=self.batch_size, total_steps=self._total_steps())
        self.trainer = Trainer(
            config, world, self.watch, self.data, self.model, self.sync, optim, self.batch_size
        )
        _seed(seed + 1 + world.rank, config.deterministic)  # dropout differs between the ranks
        self._resume()

    def _build_model(self) -> nn.Module:
        model: nn.Module = build(
            self.config.model,
            image_shape=self.data.image_shape,
            num_classes=self.data.num_classes,
        )
        if "_target_" in self.config.transform:
            transform = build(self.config.transform)
            self.record["transform"] = type(transform).__name__
            self.record["untransformed"] = report.sizes(model)
            try:
                model = transform(model)
            except ValueError as error:
                raise ConfigError(f"strategy={self.config.strategy}: {error}") from None
        model = model.to(self.world.device)
        if self.config.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        replicas.broadcast_state(model, self.world)
        self.record |= report.sizes(model)
        return model

    def _total_steps(self) -> int:
        if self.config.steps is not None:
            return self.config.steps
        epochs = DEFAULT_EPOCHS if self.config.epochs is None else self.config.epochs
        return max(1, math.ceil(epochs * self.data.num_train / self.batch_size))

    def _resume(self) -> None:
        resume = self.config.resume
        if resume is None:
            return
        path = checkpoint.newest(self.directory.checkpoints) if resume == "auto" else Path(resume)
        if path is None:
            return
        try:
            self.trainer.load_state(*checkpoint.load(path))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _train(self) -> None:
        config, trainer = self.config, self.trainer
        bar = tqdm(
            total=trainer.total_steps,
            initial=trainer.progress.step,
            desc=self.directory.path.name,
            unit="step",
            disable=self.world.rank != 0,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )
        with bar:
            for step in trainer.steps():
                bar.update()
                last = step == trainer.total_steps
                if last or (config.eval_every and step % config.eval_every == 0):
                    self._note(bar, trainer.evaluate())
                if config.checkpoint_every and step % config.checkpoint_every == 0:
                    self._save()
        if trainer.progress.step < trainer.total_steps:
            self._save()

    def _save(self) -> None:
        shared, own = self.trainer.state()
        step = self.trainer.progress.step
        checkpoint.save(self.directory.checkpoints, step, shared, own, self.world)

    def _note(self, bar: tqdm, result: dict[str, float]) -> None:
        bar.set_postfix({key: f"{result[key]:.4g}" for key in ("loss", "accuracy")})
        if self.recorder and self.world.rank == 0:
            values = {f"test/{key}": result[key] for key in ("loss", "accuracy", "seconds")}
            self.recorder.log(int(result["step"]), values)

    def _open_records(self) -> None:
        self.directory.write_config(OmegaConf.to_yaml(self.config, resolve=True))
        if self.recorder:
            config: Any = OmegaConf.to_container(self.config, resolve=True)
            self.recorder.start(self.directory.path, self.config.study, config)

    def _write_record(self) -> None:
        self.record["duration_s"] = time.monotonic() - self.began
        self.directory.write_record(self.record)
        recorder = getattr(self, "recorder", None)
        if recorder and self.world.rank == 0:
            recorder.finish(self.record)

    def _end_process(self, failure: Failure) -> None:
        """Record a failure and leave, whatever the threads and devices of this process wait for.

        Rank 0 records; should it be lost, another rank does.
        """
        if self.world.rank and self._recorded_by_rank_0():
            end_process(1)
        trainer = getattr(self, "trainer", None)
        self.record["num_steps"] = trainer.progress.step if trainer else 0
        self.record |= asdict(failure)
        with contextlib.suppress(OSError):  # the error itself must still be printed
            self._write_record()
        print(f"lab.train: error: {failure.error}", file=sys.stderr)
        end_process(1)

    def _recorded_by_rank_0(self) -> bool:
        began = datetime.fromisoformat(self.record["started_at"]).timestamp()
        deadline = time.monotonic() + RECORD_WAIT_S
        while time.monotonic() < deadline:
            if self.directory.recorded_since(began):
                return True
            time.sleep(0.1)
        return False

    def _identity(self) -> dict[str, Any]:
        """What a record says of a run that has only just begun."""
        config, world = self.config, self.world
        return {
            "status": "failed",
            "error": None,
            "study": config.study,
            "cell": self.directory.path.name,
            "repeat": config.repeat,
            "strategy": config.strategy,
            "variant": variant(self.arguments),
            "model": config.model["_target_"].rpartition(".")[2],
            "data": config.data["_target_"].rpartition(".")[2],
            "world_size": world.size,
            "batch_size": self.batch_size,
            "per_rank_batch_size": self.batch_size // world.size,
            "scaling": config.scaling,
            "precision": config.precision,
            "measure": config.measure,
            "device": world.device.type,
            "backend": world.backend,
            "started_at": datetime.now(UTC).isoformat(),
            "transform": None,
            "untransformed": None,
            **report.NOTHING_MEASURED,
            **report.surroundings(world),
        }


def claim_directory(config: DictConfig, arguments: list[str], world: World) -> RunDirectory:
    """Rank 0 claims the run's directory, and tells the others where it is or why there is none.

    Raises:
        ConfigError: it is taken, or cannot be written.
    """
    answer = ""
    if world.rank == 0:
        parent = Path(config.runs_dir).absolute() / config.study
        name = run_name(arguments, config.strategy, world.size)
        try:
            answer = f"at {RunDirectory.claim(parent, config.cell, name, bool(config.resume)).path}"
        except ValueError as error:
            answer = f"no {error}"
    verdict, _, text = world.broadcast_text(answer).partition(" ")
    if verdict == "no":
        raise ConfigError(text)
    return RunDirectory(Path(text))


def _seed(seed: int, deterministic: bool) -> None:
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
