"""A run's directory and record, from its begin to its end: the Trainer's or a user's own loop's."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from lab.cluster.settings import EMULATION, straggler_of
from lab.distributed import launcher
from lab.distributed.worker import Failure
from lab.distributed.world import World
from lab.measure.environment import environment, git_commit, num_cores
from lab.record.run_directory import RunDirectory
from lab.record.schema import Emulation, Record, worded
from lab.settings.config import ConfigError
from lab.settings.names import resolved, run_name, variant
from lab.settings.own_code import fingerprint
from lab.settings.secrets import kept, kept_words
from lab.task.metrics import metrics_of
from lab.training.assemble import global_batch_size
from lab.training.outcome import note_progress
from lab.training.progress import summary
from lab.training.trainer import Loop


class Recording:
    """One rank's part in the record of a run, from its first step to its end.

    The trainer's run (lab/training/run.py) and one in the user's own loop (lab/loop/run.py) are
    Recordings, each of its own `loop`.

    Args:
        config: the run's settings. arguments: those that name it.
        directory: claimed for this run.
        launch: the job that starts it, see lab.distributed.launcher.launch_id.
        started_at: of the start; None: now.
        known: more of the record's values.

    Attributes:
        loop: the steps, once there are any to be made.
        record: says failed until the end, as a run that is lost cannot say so itself.
        recorded: rank 0 has written that the run ended; a rank lost after this changes nothing.
    """

    loop: Loop | None = None

    def __init__(
        self,
        config: DictConfig,
        arguments: list[str],
        world: World,
        directory: RunDirectory,
        launch: str | None = None,
        started_at: datetime | None = None,
        **known: Any,
    ) -> None:
        self.config, self.world, self.directory, self.launch = config, world, directory, launch
        self._began, self.started_at = time.monotonic(), started_at or datetime.now(UTC)
        self.recorded = False
        batch_size = global_batch_size(config, world.size)
        self.record = Record(
            status="failed",
            study=config.study,
            cell=directory.path.name,
            repeat=config.repeat,
            strategy=config.strategy,
            variant=variant(arguments),
            settings=resolved(settings_of(config)),
            world_size=world.size,
            batch_size=batch_size,
            per_rank_batch_size=batch_size // world.size,
            scaling=config.scaling,
            precision=config.precision,
            launcher=world.place.launcher,
            device=world.device.type,
            backend=world.comm.backend,
            started_at=self.started_at.isoformat(),
            emulation=emulation(world, config),
            environment=environment(world.num_hosts, asks_tools=world.place.local_rank == 0),
            git_commit=git_commit(),
            **known,
        )

    @property
    def path(self) -> Path:
        return self.directory.path

    def open(self, first_step: int) -> None:
        """Write on rank 0 that the run begins, and its settings."""
        attempt = {"first_step": first_step, "world_size": self.world.size}
        attempt |= {"started_at": self.record.started_at, "launch": self.launch}
        self.directory.begin_attempt(attempt)
        self.directory.write_config(OmegaConf.to_yaml(settings_of(self.config)))

    def end(self, stop_signal: str | None = None) -> None:
        """Record how the run ended or was stopped, and print its summary."""
        assert self.loop
        progress, record = self.loop.progress, self.record
        note_progress(self.loop, record)
        if progress.step < self.loop.total_steps:
            record.end("interrupted", f"stopped by {stop_signal}")
        else:
            record.end("done", None)
            record.final = metrics_of(progress.evaluations[-1]) if progress.evaluations else {}
        if self.world.rank == 0:
            self.write()
            self.recorded = True
            print(summary(self.record, self.path))

    def fail(self, failure: Failure) -> None:
        """Note how the run failed; `write` follows, on one rank."""
        if self.loop:
            note_progress(self.loop, self.record)
        self.record.end(failure.status, failure.error, failure.traceback)

    def write(self) -> None:
        self.record.attempts = self.directory.attempts()
        self.record.duration_s = time.monotonic() - self._began
        self.directory.write_record(self.record)


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Return a run's settings, nested as they are composed, without secrets."""
    return kept(OmegaConf.to_container(config, resolve=True))


def claim_directory(config: DictConfig, arguments: list[str], world: World) -> RunDirectory | None:
    """Claim the directory of a run of the lab's own trainer; see `claim`."""
    name = run_name(arguments, config.strategy, world.size, fingerprint(config.code))
    launch = launcher.launch_id(kept_words(arguments))
    return claim(world, config, name, config.cell, config.resume, launch)


def claim(
    world: World,
    config: DictConfig,
    name: str,
    cell: str | None = None,
    resume: str | None = None,
    launch: str | None = None,
) -> RunDirectory | None:
    """Claim a run's directory on rank 0, and tell the others its path, or why there is none.

    Args: name, cell, resume, launch: see RunDirectory.claim.

    Returns: None if an earlier start of this job has already finished.

    Raises: ConfigError: it is taken, or cannot be written.
    """
    answer, claimed = "", None
    if world.rank == 0:
        parent = Path(config.runs_dir).absolute() / config.study
        try:
            claimed = RunDirectory.claim(parent, cell, name, resume, launch)
            answer = f"{'done' if claimed.status() == 'done' else 'at'} {claimed.path}"
        except ValueError as error:
            answer = f"no {error}"
    verdict, _, text = world.broadcast_text(answer).partition(" ")
    if verdict == "no":
        raise ConfigError(text)
    if verdict == "done":
        if claimed:
            claimed.release()
            print(f"already done by an earlier start of this job: {text}")
        return None
    return claimed or RunDirectory(Path(text))  # rank 0's holds the lock


def surroundings(world: World, *configs: DictConfig) -> dict[str, Any]:
    """Describe machine, software and emulation, for the result of a benchmark.

    Args: configs: settings of the runs.
    """
    return {
        "emulation": worded(emulation(world, *configs)) or "none",
        "comm_settings": world.comm.settings,
        "environment": environment(world.num_hosts, asks_tools=world.place.local_rank == 0),
        "git_commit": git_commit(),
    }


def emulation(world: World, *configs: DictConfig) -> list[Emulation]:
    """List the ways in which ranks that run `configs` are emulated."""
    hosts = os.environ.get(EMULATION)
    num_ranks = world.size if hosts else world.place.local_size  # on this machine
    num_gpus, threads = torch.cuda.device_count(), num_ranks * torch.get_num_threads()
    found = [Emulation("hosts", hosts)] if hosts else []
    if world.device.type == "cuda" and num_ranks > num_gpus:
        found.append(Emulation("shared_gpus", f"{num_ranks} ranks share {num_gpus} GPUs"))
    if world.device.type == "cpu" and threads > num_cores():
        detail = f"{threads} threads of {num_ranks} ranks share {num_cores()} CPU cores"
        found.append(Emulation("shared_cores", detail))
    profiles = dict.fromkeys(c.profile.get("name") for c in configs if "profile" in c.model)
    found += [Emulation("replay", f"compute replayed from profile {name}") for name in profiles]
    stragglers = dict.fromkeys(straggler_of(config, world.size) for config in configs)
    return found + [Emulation("straggler", one.describe()) for one in stragglers if one]
