"""Altair, and what draws its charts, imported at their first use: what only measures needs neither.

So a machine without them can measure, and another one draws its results.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt
    import vl_convert
else:

    class _Later:
        """A module that is imported when one of its names is asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self._name), name)

    alt, vl_convert = _Later("altair"), _Later("vl_convert")

__all__ = ["alt", "vl_convert"]
