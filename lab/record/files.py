"""JSON files, and their values as the types that a dataclass declares."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from lab.settings.atomic import write_atomically


def write_json(path: Path, value: dict[str, Any] | list[Any]) -> None:
    """Write `value` as readable JSON. A non-finite number becomes null: JSON has none."""
    text = json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast(list[Any], value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def decode(kind: Any, value: Any, key: str) -> Any:
    """Convert a JSON `value` to a `kind`.

    Args:
        kind: bool, int, float, str, None, Any, a Literal, list[...], tuple[..., ...],
            dict[str, ...], a union of these, or a dataclass of them: of one that is made already
            nothing is checked. Unknown keys are ignored, and a field with a default may be missing.
        key: path of the value for errors: a.b is b in a.

    Raises: ValueError: the value does not fit; one line that names the key.
    """
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return value if type(value) is kind else _dataclass(kind, value, key)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # only `X | None` occurs
        if value is None and type(None) in parts:
            return None
        (member,) = (each for each in parts if each is not type(None))
        return decode(member, value, key)
    if origin is Literal:
        if value not in parts:
            raise ValueError(f"{key}={value!r}: must be one of {', '.join(map(str, parts))}")
        return value
    if origin is list:
        return [
            decode(parts[0], item, f"{key}[{i}]") for i, item in enumerate(_a(list, value, key))
        ]
    if origin is tuple:
        return tuple(decode(parts[0], item, key) for item in _a(tuple, value, key))
    if origin in (dict, Mapping):
        return {k: decode(parts[1], item, f"{key}.{k}") for k, item in _a(dict, value, key).items()}
    if kind is float and type(value) is int:
        return float(value)
    return _a(kind, value, key)


def check_types(made: object) -> None:
    """Check that the fields of a dataclass have the types that it declares, as `decode` has them.

    Raises: ValueError: one has not; one line that names the field.
    """
    for field in dataclasses.fields(cast(Any, made)):
        decode(_hints(type(made))[field.name], getattr(made, field.name), field.name)


def _a(kind: type, value: Any, key: str) -> Any:
    if type(value) is not kind:  # True is an int to isinstance
        shown = "null" if value is None else repr(value)
        raise ValueError(f"{key}={shown}: must be {kind.__name__}")
    return value


def _dataclass(kind: Any, value: Any, key: str) -> Any:
    items: dict[str, Any] = _a(dict, value, key)
    prefix, missing, found = f"{key}." if key else "", dataclasses.MISSING, dict[str, Any]()
    for field in dataclasses.fields(kind):
        if field.name in items:
            place = prefix + field.name
            found[field.name] = decode(_hints(kind)[field.name], items[field.name], place)
        elif field.default is missing and field.default_factory is missing:
            raise ValueError(f"{prefix}{field.name}: is missing")
    return kind(**found)


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass' fields; making them from their text takes milliseconds."""
    return get_type_hints(kind)
