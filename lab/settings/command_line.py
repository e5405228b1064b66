"""What all commands say to their users."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lab.settings.config import FIELDS, GROUPS, ConfigError, choices_of, load

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: stopped by a signal, resume=auto goes on


def answer_help(
    command: str,
    purpose: str,
    examples: tuple[str, ...],
    arguments: list[str],
    own: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> bool:
    """Print help if it is asked for; whether it was. `own`: the command's own settings."""
    if not {"-h", "--help"} & set(arguments):
        return False
    lines = [f"usage: python -m {command} [setting=value ...]", "", purpose, "", "groups:"]
    lines += [f"  {group:<20} {', '.join(choices_of(group))}" for group in GROUPS]
    lines += ["", "settings:"]
    lines += [f"  {f'{name}={default}':<28} {text}" for name, (default, text) in own.items()]
    for name, field in FIELDS.items():
        if name not in GROUPS:
            default = "null" if field.default is None else str(field.default)
            allowed = " | ".join(map(str, field.metadata["choices"]))
            text = field.metadata["help"] + (f" ({allowed})" if allowed else "")
            lines.append(f"  {name + '=' + default.lower():<28} {text}")
    lines += ["", "settings of the groups' choices (strategy=onebit --help shows that one's):"]
    lines += [f"  {line}" for line in _settings_of_choices(arguments)]
    lines += ["", "examples:", *(f"  {example}" for example in examples)]
    print("\n".join(lines))
    return True


def _settings_of_choices(arguments: list[str]) -> list[str]:
    try:
        config = load([argument for argument in arguments if "=" in argument])
    except ConfigError:  # help is what was asked for
        config = load([])
    lines = []
    for group in GROUPS[1:]:
        for key, value in config[group].items():
            if not str(key).startswith("_") and not _is_data(value):
                lines.append(f"{group}.{key}={_as_written(value)}")
    return lines


def _as_written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_as_written(each)}" for key, each in value.items()) + "}"
    return json.dumps(value) if value in (None, True, False) else str(value)


def _is_data(value: Any) -> bool:
    """Whether it is what a profile holds, or a choice within a choice, rather than a setting."""
    if isinstance(value, Mapping):
        return "_target_" in value
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and any(isinstance(v, Mapping) for v in value)


def report_error(command: str, error: Exception) -> None:
    """One line on stderr."""
    print(f"{command}: error: {error}", file=sys.stderr)
