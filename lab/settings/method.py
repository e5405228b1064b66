"""An exchange that is put together: `path=two_stage codec=int8 memory=error_feedback`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lab.settings.errors import ConfigError
from lab.settings.files import choices_of, read_file
from lab.settings.overrides import Override
from lab.settings.own_code import names_code

DEFAULTS = {"path": "two_stage", "codec": "int8", "memory": "error_feedback"}


def apart(overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """Separate the overrides that put an exchange together from all others.

    Raises:
        ConfigError: another exchange is chosen as well.
    """
    own = [each for each in overrides if each.key_or_group.partition(".")[0] in DEFAULTS]
    others = [each for each in overrides if each not in own]
    for each in others if own else ():
        if each.key_or_group.partition(".")[0] == "exchange":
            raise ConfigError(
                f"{each.input_line}: path=, codec= and memory= make an exchange; leave it out"
            )
    return own, others


def exchange_of(overrides: Sequence[Override], config_dir: str | None) -> DictConfig:
    """Return the settings of an exchange, as any other has them.

    Args:
        overrides: choices of parts, and settings of these; at least one.

    Raises:
        ConfigError: there is no such choice, or a choice has no such setting.
    """
    chosen = DEFAULTS | {
        each.key_or_group: str(each.value()) for each in overrides if each.key_or_group in DEFAULTS
    }
    parts = {name: _read(name, choice, config_dir) for name, choice in chosen.items()}
    for each in overrides:
        name, _, key = each.key_or_group.partition(".")
        if key and key not in parts[name]:
            has = ", ".join(known for known in parts[name] if known != "_target_") or "none"
            raise ConfigError(
                f"{each.input_line}: no such setting; those of {name}={chosen[name]} are: {has}"
            )
        if key:
            parts[name][key] = each.value()
    coded = {"codec": parts["codec"], "memory": parts["memory"]}
    return OmegaConf.create(_along(parts["path"], coded, config_dir))


def _along(path: dict[str, Any], coded: dict[str, Any], config_dir: str | None) -> dict[str, Any]:
    """Return the exchange of messages along a path, or along the one between its nodes."""
    if "inter" not in path:
        return path | coded
    return path | {
        "inter": _along(_read("path", str(path["inter"]), config_dir), coded, config_dir)
    }


def _read(group: str, choice: str, config_dir: str | None) -> dict[str, Any]:
    if choice not in choices_of(group, config_dir) and names_code(choice):
        return {"_target_": choice.replace(":", ".")}
    return dict(read_file(group, choice, config_dir))
