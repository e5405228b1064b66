"""A run's record as it begins: what it is, before anything is measured."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lab.distributed.world import World
from lab.measure.environment import git_commit
from lab.record.schema import Record
from lab.settings.names import class_name, resolved, variant
from lab.settings.secrets import kept
from lab.training.assemble import global_batch_size
from lab.training.compiled import compiled_as
from lab.training.surroundings import emulation, environment_of


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
