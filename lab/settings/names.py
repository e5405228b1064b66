"""Names of runs, made from their settings."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

AXES = ("strategy", "world_size", "batch_size", "scaling", "repeat", "measure")
AXIS_LETTERS = {"batch_size": "b", "repeat": "r"}
BOOKKEEPING = (
    "study",
    "cell",
    "runs_dir",
    "resume",
    "config_dir",
    "recorder",
    "exchange_timeout_s",
)
LONGEST = 120  # characters of a name; file systems take 255 bytes


def variant(arguments: Sequence[str]) -> dict[str, str]:
    """Return the settings of a run other than a study's usual axes and its bookkeeping.

    `+key=value` is kept under its key, `~key` under that with the tilde and without a value.
    """
    return {
        key: value
        for key, value in _by_key(arguments).items()
        if key not in AXES and key.split(".")[0] not in BOOKKEEPING
    }


def _by_key(arguments: Sequence[str]) -> dict[str, str]:
    pairs = (argument.lstrip("+").partition("=") for argument in arguments)
    return {key: value for key, _, value in pairs}


def run_name(arguments: Sequence[str], strategy: str, world_size: int) -> str:
    """Return a readable name of a run: strategy, ranks and other settings."""
    texts = _by_key(arguments)
    parts = [strategy, f"n{world_size}"]
    parts += [f"{AXIS_LETTERS[key]}{texts[key]}" for key in AXIS_LETTERS if key in texts]
    parts += [texts[key] for key in ("scaling", "measure") if key in texts]
    parts += [f"{key}_{value}" for key, value in variant(arguments).items()]
    name = "-".join(parts)
    readable = re.sub(r"[^\w.+\-]+", "_", name)
    if len(readable) <= LONGEST:
        return readable
    return f"{readable[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
