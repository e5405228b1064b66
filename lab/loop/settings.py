"""The settings of an exchange for a user's own loop, composed as a run's are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from lab.settings.config import ConfigError, load
from lab.settings.files import choices_of
from lab.settings.names import class_name
from lab.settings.overrides import quoted
from lab.sync.pattern import class_of

COMMON = ("exchange", "exchange_timeout_s", "config_dir")


def compose(strategy: str, overrides: Mapping[str, Any], own: tuple[str, ...] = ()) -> DictConfig:
    """Compose a strategy that averages gradients in every step, and nothing else.

    Args:
        strategy: a choice of strategy= or exchange=.
        overrides: more settings by dotted key, such as {"exchange.threshold": "mean"}.
        own: keys that are allowed besides COMMON.

    Raises:
        ConfigError: an unknown name or key, or a strategy that does more, less or something else.
    """
    for key, value in overrides.items():
        if key.split(".")[0] not in (allowed := (*COMMON, *own)):
            raise ConfigError(f"{key}={value}: allowed here are {', '.join(allowed)}")
    folder = overrides.get("config_dir")
    words = [f"{key}={text_of(value)}" for key, value in overrides.items()]
    exchanges = [name for name in choices_of("exchange", folder) if name != "none"]
    if strategy in choices_of("strategy", folder):
        config = load([f"strategy={strategy}", *words])
        reason = _refusal(config)
    elif strategy in exchanges or not strategy.isidentifier():  # a path to one's own
        config = load(["strategy=overlap", f"exchange={strategy}", *words])
        reason = _refusal(config)
    else:
        config, reason = None, "there is no such strategy or exchange"
    if config is None or reason:
        names = ", ".join(exchanges)
        raise ConfigError(f"strategy={strategy}: {reason}; in your own loop works any of {names}")
    return config


def _refusal(config: DictConfig) -> str:
    """Return why a strategy is no average of gradients in every step; empty if it is."""
    if class_of(config) != "GradSync":
        return "is not one average of gradients in every step"
    if "_target_" in config.transform:
        return "also rewrites the model"
    if class_name(config.exchange._target_) == "NoExchange":
        return "exchanges nothing"
    return ""


def text_of(value: Any) -> str:
    """Write a Python value in the grammar of the command line."""
    plain = isinstance(value, str) and re.fullmatch(r"[\w./:+-]+", value)
    if plain or not isinstance(value, str):
        return str(value) if plain else json.dumps(value)
    return quoted(value)
