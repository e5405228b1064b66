"""The identity of a user's own loop, for its record, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from lab.distributed.world import World
from lab.loop.settings import text_of
from lab.measure.environment import git_commit, source_hash
from lab.record.schema import Record
from lab.settings.config import FIELDS, ConfigError, check_batch, load
from lab.settings.errors import one_line
from lab.settings.files import choices_of
from lab.settings.names import OF_STRATEGY, resolved, variant
from lab.settings.secrets import kept
from lab.training.assemble import count, global_batch_size
from lab.training.identity import emulation, environment_of


def settings_of(
    strategy: str | None,
    composed: Mapping[str, Any] | None,
    model: str,
    own: Mapping[str, Any],
    world_size: int,
    **scalars: Any,
) -> DictConfig:
    """Return the settings of a run, checked, as `config.yaml` holds them.

    Args:
        strategy: names how gradients are exchanged; None: as `composed` does.
        composed: the settings behind a result of `lab.attach` or `lab.grad_sync`.
        own: settings of the user's own.
        scalars: settings that lab.train has too.

    Raises:
        ConfigError: neither strategy nor `composed`, a value that lab.train would refuse, or an own
            setting with a name of the lab's or a value that no file of settings can hold.
    """
    if composed is None and strategy is None:
        raise ConfigError("strategy=None: name how gradients are exchanged, or pass sync=")
    _require_plain(own)
    if taken := {*FIELDS} & set(own):
        raise ConfigError(f"settings: {min(taken)} is a name of the lab's; choose another")
    known = strategy in choices_of("strategy")
    words = [f"strategy={strategy}"] if known else []
    checked = load([*words, *(f"{key}={text_of(value)}" for key, value in scalars.items())])
    check_batch(checked, world_size)
    settings: Any = OmegaConf.to_container(checked, resolve=True)
    source = composed or (settings if known else {})
    return OmegaConf.create(
        {
            "strategy": strategy or source["strategy"],
            "model": {"name": model},
            **{key: settings[key] for key in scalars},
            **{key: source[key] for key in OF_STRATEGY if key in source},
            **own,
        }
    )


def _require_plain(own: Mapping[str, Any]) -> None:
    try:
        OmegaConf.create(dict(own))
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            "settings: must map names to numbers, texts, and lists and dicts of them: "
            f"{one_line(error)}"
        ) from None


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
    settings: Any = kept(OmegaConf.to_container(config, resolve=True))
    batch_size = global_batch_size(config, world.size)
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
        batch_size=batch_size,
        per_rank_batch_size=batch_size // world.size,
        scaling=config.scaling,
        precision=config.precision,
        launcher=world.place.launcher,
        device=world.device.type,
        backend=world.comm.backend,
        emulation=emulation(world, config),
        environment=environment_of(world),
        git_commit=git_commit(),
        **described,
        **known,
    )
