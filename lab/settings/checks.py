"""Checks of values. All refuse in one line that names the key, the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from operator import ge, gt, le, lt
from typing import Any, TypeGuard

from lab.settings.errors import ConfigError


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
            return f" from {low:.16g} to {high:.16g}"
        most = "of at most" if self.above is None else "at most"
        ends = {"of at least": low, "above": self.above, most: high, "below": self.below}
        words = [f"{word} {end:.16g}" for word, end in ends.items() if end is not None]
        return f" {' and '.join(words)}" if words else ""


def whole(
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


def one_of(key: str, value: object, allowed: Collection[str]) -> str:
    """Return one of the `allowed` words. ConfigError: it is none of them, which are listed."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{key}={as_text(value)}: allowed: {', '.join(allowed)}")
    return value


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer. True and False, which are in Python, are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number. True and False are none."""
    return (is_whole(value) or isinstance(value, float)) and math.isfinite(value)


def as_text(value: Any) -> str:
    """Write a value as a command line does: null, true, a,b."""
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    known = {None: "null", True: "true", False: "false"}
    return known[value] if value is None or isinstance(value, bool) else str(value)
