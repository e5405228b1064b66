"""The command line of lab.profile_layers. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from lab.cluster.settings import adopt_ranks, num_launched
from lab.settings.config import load
from lab.settings.errors import ConfigError
from lab.settings.fields import file_to_write
from lab.settings.overrides import expanded

FEWER = 4  # the second batch is smaller by this factor, where only one is given
# A rate of 0 keeps the weights, so that no model diverges however many steps are timed.
DEFAULTS = ("strategy=none", "steps=48", "warmup_steps=8", "optim.lr=0", "measure=breakdown")
TURN = 4  # steps of one batch in a row, of which two have clocks


def read(settings: Sequence[str]) -> list[DictConfig]:
    """Read the run's settings at each of several batches, the largest first.

    Raises:
        ConfigError: a setting is wrong, or layers cannot be measured with it.
    """
    for setting in settings:
        if setting.startswith("strategy="):
            raise ConfigError(
                f"{setting} has no effect, because nothing is exchanged; to change the model, set "
                "transform=, as in transform=fc1x1"
            )
    batches = expanded(settings).get("batch_size", [])
    if len(batches) > 1:
        common = [text for text in settings if not text.startswith("batch_size=")]
        configs = [load([*DEFAULTS, *common, each]) for each in batches]
    else:
        configs = [load([*DEFAULTS, *settings])]
        fewer = max(1, configs[0].batch_size // FEWER)
        configs.append(load([*DEFAULTS, *settings, f"batch_size={fewer}"]))
    _check(configs)
    return sorted(configs, key=lambda config: -config.batch_size)


def _check(configs: Sequence[DictConfig]) -> None:
    config = configs[0]
    for key, needed in (("accumulate", 1), ("compile", False), ("measure", "breakdown")):
        if config[key] != needed:
            raise ConfigError(
                f"{key}={config[key]}: layers can be measured only with {key}={needed}"
            )
    if config.steps < config.warmup_steps + TURN:
        raise ConfigError(
            f"steps={config.steps}: must be at least {TURN} more than "
            f"warmup_steps={config.warmup_steps}"
        )
    batches = [each.batch_size for each in configs]
    if len(set(batches)) < len(batches):
        raise ConfigError(
            f"batch_size={batches[0]}: a line through the times needs two different batch sizes, "
            "as in batch_size=16,32"
        )
    adopt_ranks()
    if num_launched() > 1:
        raise ConfigError(
            f"{num_launched()} ranks were started: layers are measured on one rank; leave the "
            "launcher out"
        )


def profile_file(text: str) -> Path | None:
    """Return the file that `out=` names, also a choice of `profile=`; None for `null`.

    Raises:
        ConfigError: the name cannot be a choice, or the file cannot be written.
    """
    path = file_to_write("out", text, ".yaml")
    if path and not re.fullmatch(r"[\w-]+", path.stem):
        raise ConfigError(
            f"out={text}: must be NAME.yaml, with only letters, digits, _ and - in NAME"
        )
    return path
