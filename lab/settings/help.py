"""The help of a command, made from its settings and the schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.settings.command import Command
from lab.settings.config import FIELDS, GROUPS, ConfigError, load
from lab.settings.files import choices_of
from lab.settings.overrides import config_dir_of

GRAMMAR = """\
flags, as in Hydra:
  --config-dir DIR   your own choices too: DIR/strategy/mine.yaml is strategy=mine
  --cfg job          print the settings, composed and checked, and end
{}settings may be added to a choice and removed from it: +exchange.key=value ~exchange.key"""
MULTIRUN = "  -m, --multirun     a grid, as python -m lab.sweep: settings take lists\n"


def help_text(command: Command, arguments: Sequence[str]) -> str:
    """Return the text of `--help`; `arguments` select the choices whose settings are listed."""
    lines = [f"usage: {command.usage}", "", command.purpose]
    lines += _of_run(command, arguments) if command.runs else _own(command)
    lines += ["", "examples:", *(f"  {example}" for example in command.examples)]
    return "\n".join(lines)


def _own(command: Command) -> list[str]:
    pairs = [(f"{name}={default}", text) for name, (default, text) in command.settings.items()]
    return _columns("settings:", pairs) if pairs else []


def _of_run(command: Command, arguments: Sequence[str]) -> list[str]:
    try:
        config_dir = config_dir_of(arguments)
    except ConfigError:  # help is what was asked for
        config_dir = None
    lines = ["", "groups:"]
    lines += [f"  {name:<20} {', '.join(choices_of(name, config_dir))}" for name in GROUPS]
    pairs = [(f"{name}={default}", text) for name, (default, text) in command.settings.items()]
    for name, field in FIELDS.items():
        if name not in (*GROUPS, "code"):
            default = "null" if field.default is None else str(field.default)
            allowed = " | ".join(map(str, field.metadata["choices"]))
            text = field.metadata["help"] + (f" ({allowed})" if allowed else "")
            pairs.append((f"{name}={default.lower()}", text))
    lines += _columns("settings:", pairs)
    lines += ["", "settings of the groups' choices (strategy=onebit --help shows that one's):"]
    lines += [f"  {line}" for line in _settings_of_choices(arguments)]
    return [*lines, "", GRAMMAR.format(MULTIRUN if command.sweeps else "")]


def _columns(title: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    return ["", title, *(f"  {setting:<28} {text}" for setting, text in pairs)]


def _settings_of_choices(arguments: Sequence[str]) -> list[str]:
    try:
        config = load([argument for argument in arguments if "=" in argument])
    except ConfigError:  # help is what was asked for
        config = load([])
    return [
        f"{group}.{key}={_as_written(value)}"
        for group in GROUPS[1:]
        for key, value in config[group].items()
        if not str(key).startswith("_") and not _is_data(value)
    ]


def _as_written(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{key}: {_as_written(nested)}" for key, nested in value.items())
        return "{" + ", ".join(items) + "}"
    return json.dumps(value) if value in (None, True, False) else str(value)


def _is_data(value: Any) -> bool:
    """Return whether `value` is a profile's content or a nested choice, and not a setting."""
    if isinstance(value, Mapping):
        return "_target_" in value
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and any(isinstance(entry, Mapping) for entry in value)
