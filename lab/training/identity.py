"""A run as it begins: its directory, and what its record says of it before anything is measured."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from lab.cluster.settings import EMULATION
from lab.cluster.straggler import straggler_of
from lab.distributed import launcher
from lab.distributed.world import World
from lab.measure.environment import environment, git_commit, num_cores
from lab.record.run_directory import RunDirectory
from lab.record.schema import Emulation, Record, worded
from lab.settings.config import ConfigError
from lab.settings.names import class_name, resolved, run_name, variant
from lab.settings.own_code import fingerprint
from lab.settings.secrets import kept, kept_words
from lab.training.assemble import compiled_as, global_batch_size


def record_of(
    config: DictConfig, arguments: list[str], world: World, cell: str, started_at: datetime
) -> Record:
    """Return the record of a run that has just begun; if the run is lost, it says failed."""
    batch_size = global_batch_size(config, world.size)
    return Record(
        status="failed",
        study=config.study,
        cell=cell,
        repeat=config.repeat,
        strategy=config.strategy,
        variant=variant(arguments),
        settings=resolved(settings_of(config)),
        model=class_name(config.model["_target_"]),
        data=class_name(config.data["_target_"]),
        task=class_name(config.task["_target_"]),
        world_size=world.size,
        batch_size=batch_size,
        per_rank_batch_size=batch_size // world.size,
        scaling=config.scaling,
        precision=config.precision,
        compile=compiled_as(config),
        measure=config.measure,
        launcher=world.place.launcher,
        device=world.device.type,
        backend=world.comm.backend,
        started_at=started_at.isoformat(),
        emulation=emulation(world, config),
        comm_settings=world.comm.settings,
        environment=environment_of(world),
        git_commit=git_commit(),
    )


def made_by(record: Record, first_step: int, end_step: int) -> dict[str, Any]:
    """Return how a run makes its steps, as lab.record.origin has it."""
    git = record.git_commit
    also = ("strategy", "scaling", "repeat", "model_source")
    return {
        "first_step": first_step,
        "end_step": end_step,
        "cell": f"{record.study}/{record.cell}",
        "world_size": record.world_size,
        "batch_size": record.batch_size,
        "commit": git["commit"] and git["commit"] + (" changed" if git["dirty"] else ""),
        "settings": record.settings | {key: getattr(record, key) for key in also},
    }


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Return a run's settings, nested as they are composed, without secrets."""
    return kept(OmegaConf.to_container(config, resolve=True))


def claim_directory(config: DictConfig, arguments: list[str], world: World) -> RunDirectory | None:
    """Claim the run's directory on rank 0, and tell the others its path, or why there is none.

    Returns: None if an earlier start of this job has already finished.

    Raises: ConfigError: it is taken, or cannot be written.
    """
    answer, claimed = "", None
    if world.rank == 0:
        parent = Path(config.runs_dir).absolute() / config.study
        name = run_name(arguments, config.strategy, world.size, fingerprint(config.code))
        try:
            claimed = RunDirectory.claim(
                parent, config.cell, name, config.resume, launcher.launch_id(kept_words(arguments))
            )
            answer = f"{'done' if claimed.status() == 'done' else 'at'} {claimed.path}"
        except ValueError as error:
            answer = f"no {error}"
    verdict, _, text = world.broadcast_text(answer).partition(" ")
    if verdict == "no":
        raise ConfigError(text)
    if verdict == "done":
        if claimed:
            claimed.release()
            print(f"done already, by an earlier start of this job: {text}")
        return None
    return claimed or RunDirectory(Path(text))  # rank 0's holds the lock


def surroundings(world: World, *configs: DictConfig) -> dict[str, Any]:
    """Describe machine, software and emulation, for the result of a benchmark.

    Args: configs: settings of the runs.
    """
    return {
        "emulation": worded(emulation(world, *configs)) or "none",
        "comm_settings": world.comm.settings,
        "environment": environment_of(world),
        "git_commit": git_commit(),
    }


def environment_of(world: World) -> dict[str, Any]:
    """Describe machine and software of this rank."""
    return environment(world.num_hosts, asks_tools=world.place.local_rank == 0)


def emulation(world: World, *configs: DictConfig) -> list[Emulation]:
    """List the ways in which ranks that run `configs` are emulated."""
    hosts = os.environ.get(EMULATION)
    shared = _sharing(world, bool(hosts))
    replays = [config for config in configs if "profile" in config.model]
    stragglers = [straggler_of(config, world.size) for config in configs]
    profiles = dict.fromkeys(config.profile.get("name") for config in replays)
    return [
        *([Emulation("hosts", hosts)] if hosts else []),
        *([shared] if shared else []),
        *(Emulation("replay", f"compute replayed from profile {name}") for name in profiles),
        *(Emulation("straggler", one.describe()) for one in dict.fromkeys(stragglers) if one),
    ]


def _sharing(world: World, one_machine: bool) -> Emulation | None:
    """List the processors that ranks of this host (or of `one_machine`) share."""
    num_ranks = world.size if one_machine else world.place.local_size
    num_gpus = torch.cuda.device_count()
    if world.device.type == "cuda" and num_ranks > num_gpus:
        return Emulation("shared_gpus", f"{num_ranks} ranks share {num_gpus} GPUs")
    threads = num_ranks * torch.get_num_threads()
    if world.device.type == "cpu" and threads > num_cores():
        detail = f"{threads} threads of {num_ranks} ranks share {num_cores()} CPU cores"
        return Emulation("shared_cores", detail)
    return None
