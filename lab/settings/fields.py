"""Typed settings: a dataclass whose fields hold default, range, unit and help, read from texts."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lab.settings import checks
from lab.settings.checks import Limits, as_text
from lab.settings.errors import ConfigError, as_config_error
from lab.settings.files import NAMED, is_folder
from lab.settings.hints import nearest, number

T = TypeVar("T")
Parser = Callable[[str, str], Any]
OF_RUNS = ("record.json", "attempts.json", "timeline.json", "study.json")
ENDLESS = 1e6  # a range that ends there or later only keeps nonsense out, and help leaves that out
INTEGER = re.compile(r"(?!.{4300})[-+]?\d+(_\d+)*")  # as in 25_000_000; Python reads no more


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    *,
    unit: str = "",
    parse: Parser | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """Define a setting as a field of a dataclass.

    Args:
        help: a line. choices: allowed words. unit: of the number, unless its key ends in one.
            parse: makes the value of a key and a text, the default's too, where its type is not
            enough. at_least, above, at_most: range of the number.
    """
    limits = Limits(at_least, above, at_most=at_most)
    metadata = {"help": help, "choices": choices, "unit": unit, "parse": parse, "limits": limits}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def file_setting(help: str, *suffixes: str) -> Any:
    """Define a setting that names a file to write, by default none; see `file_to_write`."""
    return setting("null", help, parse=lambda key, text: file_to_write(key, text, *suffixes))


def folder_setting(help: str) -> Any:
    """Define a setting that names a folder that is there, by default none."""
    return setting("null", help, parse=_folder)


def fields_of(kind: type) -> dict[str, Field[Any]]:
    """Return the settings of a dataclass by key."""
    return {field.name: field for field in dataclasses.fields(kind)}


def columns(fields: Iterable[Field[Any]]) -> list[str]:
    """Return lines of help: each setting with its default, its help, its unit and its range."""
    lines = list[str]()
    for field in fields:
        about, notes = field.metadata, allowed(field)
        shown = f"{field.name}={default_text(field)}"
        lines.append(f"  {shown:<28} {about['help']}" + (f" ({notes})" if notes else ""))
    return ["", "settings, with their defaults:", *lines] if lines else []


def default_text(field: Field[Any]) -> str:
    """Return the default of a setting, as it is written on a command line."""
    return as_text({} if field.default is dataclasses.MISSING else field.default)


def allowed(field: Field[Any]) -> str:
    """Return the unit of a setting, and its words or its range; empty if it has neither."""
    about, limits = field.metadata, field.metadata["limits"]
    if (limits.at_most or 0) >= ENDLESS:
        limits = dataclasses.replace(limits, at_most=None)
    words = " | ".join(about["choices"]) or str(limits).strip().removeprefix("of ")
    return ", ".join(filter(None, (about["unit"], words)))


def parsed(kind: type[T], texts: Mapping[str, str]) -> T:
    """Make the settings of a dataclass from texts by key; what is not given has its default.

    Raises:
        ConfigError: a text is no value of its key.
    """
    types = get_type_hints(kind)
    values = dict[str, Any]()
    for key, field in fields_of(kind).items():
        parse = field.metadata["parse"]
        if parse and (key in texts or isinstance(field.default, str)):
            values[key] = parse(key, texts.get(key, field.default))
        elif key in texts:
            values[key] = _value(key, texts[key], types[key], field.metadata)
    return kind(**values)


def own_settings(kind: type[T], arguments: Sequence[str]) -> T:
    """Read the settings of a command that has no others.

    Raises:
        ConfigError: an unknown setting, or a wrong value.
    """
    keys = fields_of(kind)
    texts, others = split(arguments, keys)
    if unknown := [*others, *(key for key in texts if key not in keys)]:
        allowed = f"allowed: {', '.join(keys)} (--help)" if keys else "this command has no settings"
        meant = nearest(unknown[0].partition("=")[0], keys)
        raise ConfigError(f"{unknown[0]}: no such setting; {f'{meant} ' if meant else ''}{allowed}")
    return parsed(kind, texts)


def split(arguments: Sequence[str], keys: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Separate a command's own settings from all others.

    Args:
        keys: the command's own keys; `hardware` includes `hardware.inter.latency_s`.

    Returns:
        The text of each own setting, the last one if repeated; and the other arguments, unchanged.
    """
    texts, others = dict[str, str](), list[str]()
    for argument in arguments:
        key, equals, text = argument.partition("=")
        root, dot, _ = key.partition(".")
        if equals and root in keys and (not dot or root in NAMED):
            texts[key] = text
        else:
            others.append(argument)
    return texts, others


def file_to_write(key: str, text: str, *suffixes: str) -> Path | None:
    """Return the file that a setting such as `out=` names; None for `null`.

    Raises:
        ConfigError: it has none of the `suffixes`, or cannot be written there.
    """
    if text == "null":
        return None
    path = Path(text)
    if path.name in OF_RUNS:
        raise ConfigError(f"{key}={text}: runs write a file with this name; choose another name")
    if path.suffix not in suffixes or not path.stem or not path.parent.is_dir():
        names = " or ".join(f"FILE{suffix}" for suffix in suffixes)
        raise ConfigError(f"{key}={text}: must name {names} in an existing folder")
    with as_config_error(f"{key}={text}: ", OSError):  # too long a name
        target = path if path.exists() else path.parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise ConfigError(f"{key}={text}: cannot write {target.absolute()}")
    return path


def _folder(key: str, text: str) -> str | None:
    if text != "null" and not is_folder(text):
        raise ConfigError(f"{key}={text}: there is no such folder")
    return None if text == "null" else str(Path(text).absolute())


def _value(key: str, text: str, kind: Any, metadata: Mapping[str, Any]) -> Any:
    """Make the value of a type from a text."""
    members = get_args(kind)
    if NoneType in members:
        if text == "null":
            return None
        (kind,) = (each for each in members if each is not NoneType)
    if get_origin(kind) is tuple:
        return _listed(key, text, get_args(kind)[0], metadata)
    if kind is bool:
        return checks.truth(key, {"true": True, "false": False}.get(text.lower(), text))
    if kind in (int, float):
        return number_of(key, text, kind, metadata["limits"])
    if kind is str and metadata["choices"]:
        return checks.one_of(key, text, metadata["choices"])
    if not text:
        raise ConfigError(f"{key}=: must be {'a path' if kind is Path else 'text'}, or left out")
    return kind(text)


def number_of(key: str, text: str, kind: type, limits: Limits) -> float:
    """Return the number of type int or float that a text is. ConfigError: it is none in range."""
    if kind is int:
        value = int(text) if INTEGER.fullmatch(text) else text
        return checks.integer(key, value, limits.at_least, limits.at_most)
    value = number(text)
    if not checks.is_number(value) or not limits.hold(value):
        raise ConfigError(f"{key}={text}: must be a number{limits}")
    return value


def _listed(key: str, text: str, kind: Any, metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of `a,b` or `[a,b]`."""
    words = [word.strip() for word in text.strip("[]").split(",")]
    if len(set(words)) < len(words):
        raise ConfigError(f"{key}={text}: a value is listed twice")
    return tuple(_value(key, word, kind, metadata) for word in words)
