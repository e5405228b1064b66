"""Checks of numbers that come from a file."""

from __future__ import annotations

import math
from typing import TypeGuard


def require_positive(key: str, value: object) -> None:
    """Refuse a value that is not a number above 0.

    Raises:
        ValueError: the message names the key.
    """
    if not is_number(value) or value <= 0:
        raise ValueError(f"{key}={value}: must be a number above 0")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a file is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value of a file is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)
