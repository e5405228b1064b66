"""Texts of a command's own settings, as values. All refuse in one line that names key and text."""

from __future__ import annotations

import math
from collections.abc import Collection

from lab.settings.errors import ConfigError


def number(key: str, text: str, at_least: float = -math.inf) -> float:
    """Return a finite number. ConfigError: `text` is none, or too small."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value >= at_least:
        return value
    least = f" of at least {at_least:g}" if math.isfinite(at_least) else ""
    raise ConfigError(f"{key}={text}: must be a number{least}")


def truth(key: str, text: str) -> bool:
    """Return true or false. ConfigError: `text` is neither."""
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"{key}={text}: must be true or false")
    return text.lower() == "true"


def listed(key: str, text: str, allowed: Collection[str] = ()) -> list[str]:
    """Return the words of `a,b` or `[a,b]`.

    Raises:
        ConfigError: where some are `allowed`, there is another among them, or there is none.
    """
    words = [word.strip() for word in text.strip("[]").split(",")] if text else []
    for word in words:
        if allowed and word not in allowed:
            raise ConfigError(f"{key}={word}: allowed are {', '.join(allowed)}")
    if allowed and not words:
        raise ConfigError(f"{key}=: name at least one of {', '.join(allowed)}")
    return words
