"""JSON values as the types that a dataclass declares, and the types of a made one."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints


def decode(kind: Any, value: Any, key: str) -> Any:
    """Convert a JSON `value` to a `kind`.

    Args:
        kind: bool, int, float, str, None, Any, a Literal, list[...], tuple[..., ...],
            dict[str, ...], a union of these, or a dataclass of them: of one that is made already
            nothing is checked. Unknown keys are ignored, and a field with a default may be missing.
        key: path of the value for errors: a.b is b in a.

    Raises:
        ValueError: the value does not fit; one line that names the key.
    """
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return value if type(value) is kind else _dataclass(kind, value, key)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(parts, value, key)
    if origin is Literal:
        return _choice(parts, value, key)
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

    Raises:
        ValueError: one has not; one line that names the field.
    """
    hints = _hints(type(made))
    for field in dataclasses.fields(cast(Any, made)):
        decode(hints[field.name], getattr(made, field.name), field.name)


def _a(kind: type, value: Any, key: str) -> Any:
    if type(value) is not kind:  # True is an int to isinstance
        raise ValueError(f"{key}={_shown(value)}; must be {kind.__name__}")
    return value


def _union(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    """Convert a union; only `X | None` occurs."""
    if value is None and type(None) in kinds:
        return None
    (kind,) = (member for member in kinds if member is not type(None))
    return decode(kind, value, key)


def _choice(allowed: tuple[Any, ...], value: Any, key: str) -> Any:
    if value not in allowed:
        raise ValueError(f"{key}={value!r}; allowed are {', '.join(map(str, allowed))}")
    return value


def _dataclass(kind: Any, value: Any, key: str) -> Any:
    items: dict[str, Any] = _a(dict, value, key)
    prefix, hints = f"{key}." if key else "", _hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in items and _is_required(field):
            raise ValueError(f"{prefix}{field.name}: is missing")
    names = [field.name for field in dataclasses.fields(kind) if field.name in items]
    return kind(**{name: decode(hints[name], items[name], prefix + name) for name in names})


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass' fields; making them from their text takes milliseconds."""
    return get_type_hints(kind)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)
