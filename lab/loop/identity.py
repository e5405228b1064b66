"""The identity of a user's own loop, for its record, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from lab.distributed.world import World
from lab.measure.environment import git_commit
from lab.measure.source import source_hash
from lab.record.schema import Record
from lab.settings.config import ConfigError, load
from lab.settings.files import choices_of
from lab.settings.names import OF_STRATEGY, resolved, variant
from lab.training import outcome
from lab.training.assemble import count


def settings_of(
    strategy: str | None,
    composed: Mapping[str, Any] | None,
    own: Mapping[str, Any],
    **scalars: Any,
) -> DictConfig:
    """Return the settings of a run, as `config.yaml` holds them.

    Args:
        strategy: names how gradients are exchanged; None: as `composed` does.
        composed: the settings behind a result of `lab.attach` or `lab.grad_sync`.
        own: settings of the user's own.
        scalars: settings of the lab that are known.

    Raises:
        ConfigError: neither strategy nor `composed`, or an own setting with a name of the lab's.
    """
    if composed is None and strategy is None:
        raise ConfigError("strategy=None: name how gradients are exchanged, or pass sync=")
    if taken := {*scalars, *OF_STRATEGY, "strategy"} & set(own):
        raise ConfigError(f"settings: {min(taken)} is a name of the lab's; choose another")
    if composed is None and strategy in choices_of("strategy"):
        found: Any = OmegaConf.to_container(load([f"strategy={strategy}"]), resolve=True)
        composed = found
    known = {key: value for key, value in (composed or {}).items() if key in OF_STRATEGY}
    name = strategy or (composed or {})["strategy"]
    return OmegaConf.create({"strategy": name, **scalars, **known, **own})


def identity(
    config: DictConfig,
    arguments: list[str],
    cell: str,
    world: World,
    model: nn.Module | None,
    **known: Any,
) -> Record:
    """Return the record of a run that has just begun; if the run is lost, it says failed.

    Args:
        arguments: the settings that name the run.
        model: the module that trains, if the record is to describe it.
        known: more of the record's values.
    """
    settings: Any = OmegaConf.to_container(config, resolve=True)
    described = {**count(model), "model_source": source_hash(model)} if model else {}
    return Record(
        status="failed",
        study=config.study,
        cell=cell,
        repeat=config.repeat,
        strategy=config.strategy,
        variant=variant(arguments),
        settings=resolved(settings),
        model=config.model.name,
        world_size=world.size,
        batch_size=config.batch_size,
        per_rank_batch_size=config.batch_size // world.size,
        scaling=config.scaling,
        precision=config.precision,
        launcher=world.place.launcher,
        device=world.device.type,
        backend=world.comm.backend,
        emulation=outcome.emulation(world, config),
        environment=outcome.environment_of(world),
        git_commit=git_commit(),
        **described,
        **known,
    )
