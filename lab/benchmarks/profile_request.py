"""The command line of lab.profile_layers. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from lab.distributed.launcher import world_size
from lab.settings.config import load
from lab.settings.errors import ConfigError
from lab.settings.overrides import file_to_write

FEWER = 4  # the second batch is smaller by this factor
# A rate of 0 keeps the weights, so that no model diverges however many steps are timed.
DEFAULTS = ("strategy=none", "steps=48", "warmup_steps=8", "optim.lr=0", "measure=breakdown")
TIMED = 4  # steps of which two have clocks


def read(settings: Sequence[str]) -> list[DictConfig]:
    """Read the run's settings as given, and with a smaller batch."""
    for setting in settings:
        if setting.startswith("strategy="):
            raise ConfigError(f"{setting}: nothing is exchanged here; take transform=fc1x1 alone")
    config = load([*DEFAULTS, *settings])
    for key, needed in (("accumulate", 1), ("compile", False), ("measure", "breakdown")):
        if config[key] != needed:
            raise ConfigError(f"{key}={config[key]}: layers are measured with {key}={needed}")
    if config.steps < config.warmup_steps + TIMED:
        raise ConfigError(
            f"steps={config.steps}: must be at least {TIMED} above "
            f"warmup_steps={config.warmup_steps}"
        )
    if config.batch_size < FEWER:
        raise ConfigError(f"batch_size={config.batch_size}: must be at least {FEWER}")
    if world_size() > 1:
        raise ConfigError(f"{world_size()} ranks were started: layers are measured on one")
    return [config, load([*DEFAULTS, *settings, f"batch_size={config.batch_size // FEWER}"])]


def profile_file(text: str) -> Path | None:
    """Return the file that `out=` names, also a choice of `profile=`; None for `null`.

    Raises:
        ConfigError: the name cannot be a choice, or the file cannot be written.
    """
    path = file_to_write("out", text, ".yaml")
    if path and not re.fullmatch(r"[\w-]+", path.stem):
        raise ConfigError(f"out={text}: must be NAME.yaml, of letters, digits, _ and -")
    return path
