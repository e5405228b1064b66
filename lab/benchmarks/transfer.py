"""Copies between host and device, read from a trace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.benchmarks.request import Request
from lab.layers.trace import left_out, read_events
from lab.layers.transfer import copies_of
from lab.measure.environment import environment, git_commit
from lab.settings.config import ConfigError

CALL = re.compile(r"(?:cuda|cu|hip)Memcpy\w*")


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
    except ValueError as error:
        raise ConfigError(f"trace={error}") from None
    skipped: Counter[str] = Counter()
    found = copies_of(events, skipped)
    if not found:
        raise ConfigError(
            f"trace={path}: holds no copies between host and device{_why(events, skipped)}"
        )
    return {
        "rows": [asdict(each) for each in found],
        "trace": path.name,
        "num_events": len(events),
        "skipped": dict(skipped),
        "emulation": "none",
        "environment": environment(1, asks_tools=False),
        "git_commit": git_commit(),
    }


def _why(events: Sequence[Mapping[str, Any]], skipped: Mapping[str, int]) -> str:
    """Return why no copy was found, to follow that none was."""
    if any(reason.startswith("copies") for reason in skipped):
        return f" that can be read; left out: {left_out(skipped)}"
    calls = Counter(name for event in events if CALL.fullmatch(name := str(event.get("name"))))
    if calls:
        name, number = calls.most_common(1)[0]
        return (
            f": it has the host's calls ({number} of {name}), not what the device did; record "
            "ProfilerActivity.CUDA too"
        )
    return (
        " (no events of category gpu_memcpy, as Kineto's, named MemcpyH2D, as XLA's, or "
        "CopyHostToDevice, as ROCm's); a run on CPUs makes none"
    )
