"""Copies between host and device, read from a trace."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.benchmarks.request import Request
from lab.layers.trace import read_events
from lab.layers.transfer import copies_of
from lab.measure.environment import environment, git_commit
from lab.settings.config import ConfigError


def measure(request: Request) -> dict[str, Any]:
    """Add up the copies of the trace `trace=FILE`.

    Raises:
        ConfigError: no trace is named, it cannot be read, or it holds no copies.
    """
    path: Path | None = request.own["trace"]
    if path is None:
        raise ConfigError(
            "trace=null: must be a trace of torch.profiler or Chrome, .json or .json.gz"
        )
    try:
        events = read_events(path)
        found = copies_of(events)
    except ValueError as error:
        raise ConfigError(f"trace={error}") from None
    if not found:
        raise ConfigError(
            f"trace={path}: holds no copies between host and device (no events of category "
            "gpu_memcpy); a run on CPUs makes none"
        )
    return {
        "rows": [asdict(each) for each in found],
        "trace": path.name,
        "num_events": len(events),
        "emulation": "none",
        "environment": environment(1, asks_tools=False),
        "git_commit": git_commit(),
    }
