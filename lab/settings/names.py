"""Names of runs, made of what was set."""

from __future__ import annotations

import hashlib
import re

AXES = ("strategy", "world_size", "batch_size", "scaling", "repeat", "measure")
AXIS_LETTERS = {"batch_size": "b", "repeat": "r"}
BOOKKEEPING = ("study", "cell", "runs_dir", "resume", "recorder", "exchange_timeout_s")
LONGEST = 120  # characters of a name; file systems take 255 bytes


def variant(arguments: list[str]) -> dict[str, str]:
    """Settings a run was given beside a study's usual axes and its bookkeeping."""
    given = (argument.partition("=") for argument in arguments)
    return {
        key: value
        for key, _, value in given
        if key not in AXES and key.split(".")[0] not in BOOKKEEPING
    }


def run_name(arguments: list[str], strategy: str, world_size: int) -> str:
    """A readable name of a run: strategy, ranks, and what else was set."""
    given = dict(argument.split("=", 1) for argument in arguments)
    parts = [strategy, f"n{world_size}"]
    parts += [f"{AXIS_LETTERS[key]}{given[key]}" for key in AXIS_LETTERS if key in given]
    parts += [given[key] for key in ("scaling", "measure") if key in given]
    parts += [f"{key}_{value}" for key, value in variant(arguments).items()]
    name = "-".join(parts)
    readable = re.sub(r"[^\w.+\-]+", "_", name)
    if len(readable) <= LONGEST:
        return readable
    return f"{readable[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
