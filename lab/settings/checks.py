"""Checks of values. All refuse in one line that names the key, the value and what is allowed."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from operator import ge, gt, le, lt
from types import NoneType
from typing import Annotated, Any, TypeGuard, TypeVar, get_args, get_type_hints

from lab.settings.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """The range of a number; None: no such end. `at_least` and `at_most` belong to it."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None

    def hold(self, value: float) -> bool:
        """Return whether a finite number is in the range."""
        ends = ((ge, self.at_least), (gt, self.above), (lt, self.below), (le, self.at_most))
        return all(end is None or holds(value, end) for holds, end in ends)

    def __str__(self) -> str:
        """Return " of at least 1", " of at least 0 and below 1", " from 0 to 1", and so on."""
        low, high = self.at_least, self.at_most
        if low is not None and high is not None:
            return f" from {_end(low)} to {_end(high)}"
        most = "of at most" if self.above is None else "at most"
        ends = {"of at least": low, "above": self.above, most: high, "below": self.below}
        words = [f"{word} {_end(end)}" for word, end in ends.items() if end is not None]
        return f" {' and '.join(words)}" if words else ""


def _end(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.16g}"


def integer(
    key: str, value: object, at_least: float | None = None, at_most: float | None = None
) -> int:
    """Return an integer.

    Raises:
        ConfigError: it is none (true and 2.0 are none), or not from `at_least` to `at_most`.
    """
    limits = Limits(at_least, at_most=at_most)
    if not is_whole(value) or not limits.hold(value):
        raise ConfigError(f"{key}={as_text(value)}: must be an integer{limits}")
    return value


def number(
    key: str,
    value: object,
    at_least: float | None = None,
    at_most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Return a finite number. ConfigError: it is none (true is none), or out of its range."""
    limits = Limits(at_least, above, below, at_most)
    if not is_number(value) or not limits.hold(value):
        raise ConfigError(f"{key}={as_text(value)}: must be a number{limits}")
    return value


def truth(key: str, value: object) -> bool:
    """Return true or false. ConfigError: it is neither."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={as_text(value)}: must be true or false")
    return value


def listed(key: str, value: Any) -> Sequence[Any]:
    """Return a list, of YAML or of OmegaConf. ConfigError: it is none."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{key}={as_text(value)}: must be a list")
    return value


def one_of(key: str, value: object, allowed: Collection[str]) -> str:
    """Return one of the `allowed` words. ConfigError: it is none of them, which are listed."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{key}={as_text(value)}: allowed: {', '.join(allowed)}")
    return value


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer. True and False, which are in Python, are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number, which a float can hold. True, False are none."""
    return (is_whole(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max


def as_text(value: Any) -> str:
    """Write a value as a command line does: null, true, a,b."""
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    known = {None: "null", True: "true", False: "false"}
    return known[value] if value is None or isinstance(value, bool) else str(value)


# Types of a dataclass' fields, with the checks that `made` calls.
AtLeast0 = Annotated[float, partial(number, at_least=0)]
AtLeast1 = Annotated[float, partial(number, at_least=1)]
Count = Annotated[int, partial(integer, at_least=1)]
Flag = Annotated[bool, truth]


def made(kind: type[T], node: Any, prefix: str, apart: Collection[str] = ()) -> T:
    """Make a dataclass from a mapping of its fields, and check values whose types have checks.

    Args:
        prefix: of a key in messages, such as "hardware=x: host.".
        apart: fields that are no keys.

    Raises:
        ConfigError: it is no mapping, a key is unknown or missing, or a value fails its check.
    """
    known = {each.name: each for each in fields(kind) if each.name not in apart}  # pyright: ignore[reportArgumentType]
    if not isinstance(node, Mapping):
        raise ConfigError(f"{prefix.rstrip('.: ')}: must have the keys {', '.join(known)}")
    for key, value in node.items():
        if key not in known:
            raise ConfigError(f"{prefix}{key}={value}: no such key; allowed: {', '.join(known)}")
    for key, field in known.items():
        hint, is_null = _hints(kind)[key], node.get(key) is None
        is_refused = is_null and NoneType not in get_args(hint)
        if field.default is MISSING and (key not in node or is_refused):
            raise ConfigError(f"{prefix}{key}: is missing")
        if key in node and (is_refused or not is_null):
            for part in (hint, *get_args(hint)):  # a member of a union may have the checks
                for check in getattr(part, "__metadata__", ()):
                    check(f"{prefix}{key}", node[key])
    return kind(**node)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
