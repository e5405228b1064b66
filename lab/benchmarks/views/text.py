"""Word what the tables and figures of all benchmarks share."""

from __future__ import annotations

import math
from typing import Any

from lab.measure.intervals import Interval

LONGEST = 400  # characters of a command in a figure
IntervalJson = dict[str, float | None]  # median, low, high


def with_host_time(lines: list[list[str]], rows: list[dict[str, Any]]) -> list[list[str]]:
    """Add a column with the time the host took to queue each call, if any row has it."""
    times = [row.get("host_s") for row in rows]
    if not any(times):
        return lines
    texts = ["host (us)", *("-" if host_s is None else f"{1e6 * host_s:.1f}" for host_s in times)]
    return [[*line, text] for line, text in zip(lines, texts, strict=True)]


def in_cache(result: dict[str, Any], smallest_bytes: int) -> list[str]:
    """Explain host times, and tell whether the smallest tensors stay in cache; only for a GPU."""
    cache = result.get("cache_bytes")
    if not cache:
        return []
    notes = ["host: what it takes to queue a call; above the call's time, launches are the limit"]
    if smallest_bytes <= cache:
        notes.append(f"tensors of up to {cache / 1e6:.0f} MB stay in the GPU's cache between calls")
    return notes


def ranged(value: IntervalJson | None, scale: float = 1.0) -> str:
    """Format an interval as 1.02 [0.99, 1.05]; omit unknown ends; - if all is unknown."""
    known = Interval.read(value).scaled(scale)
    if math.isnan(known.mid):
        return "-"
    ends = "" if math.isnan(known.lo) else f" [{known.lo:.3g}, {known.hi:.3g}]"
    return f"{known.mid:.3g}{ends}"


def machine(result: dict[str, Any]) -> str:
    """Write the ranks, the device and the torch version of a result in a line."""
    where = result["environment"]
    cores = f"{where['num_cores']} core{'s' if where['num_cores'] > 1 else ''}"
    device = ", ".join(sorted(set(where["gpus"]))) or f"{where['cpu']}, {cores}"
    ranks = (
        f"{result['world_size']} ranks over {result['backend']} · " if "backend" in result else ""
    )
    return f"{ranks}{device} · torch {where['torch']}"


def about(result: dict[str, Any]) -> list[str]:
    """List the last paragraphs of a footer: the command, and how ranks were emulated, if so."""
    how, command = result["emulation"], result["command"]
    if len(command) > LONGEST:
        command = f"{command[:LONGEST]} … (all of it stands in the result)"
    return [command, "" if how == "none" else f"emulated: {how}"]
