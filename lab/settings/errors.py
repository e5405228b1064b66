"""The error that a user can correct."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting the user can correct. Its text is one line: the key, the value, what is allowed."""


def one_line(error: object) -> str:
    """The first line of an error's text; its type where there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
