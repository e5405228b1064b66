"""Import what a setting names by its path."""

from __future__ import annotations

import importlib
from typing import Any

from lab.settings.blame import reason_of
from lab.settings.errors import ConfigError


def locate(target: str) -> Any:
    """Return the class or function that a dotted path names.

    Raises:
        ConfigError: there is none, or it cannot be called.
        Exception: its module raised it when it was imported.
    """
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        failed = error
    else:
        if not callable(found):
            raise ConfigError(f"_target_={target}: must be a class or a function")
        return found
    raise reason_of(failed, target)
