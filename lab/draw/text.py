"""Words and marks that the tables and figures of all benchmarks share."""

from __future__ import annotations

import math
from typing import Any

from lab.measure.intervals import Interval

Named = dict[str, float | None]  # an interval as JSON holds it: median, low, high


def aligned(table: list[list[str]]) -> list[str]:
    """A header and its lines with the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def with_host_time(lines: list[list[str]], rows: list[dict[str, Any]]) -> list[list[str]]:
    """The lines, and where rows have it, what the host took to queue each row's call."""
    times = [row.get("host_s") for row in rows]
    if not any(times):
        return lines
    texts = ["host (us)", *("-" if each is None else f"{1e6 * each:.1f}" for each in times)]
    return [[*line, text] for line, text in zip(lines, texts, strict=True)]


def in_cache(result: dict[str, Any], smallest_bytes: int) -> list[str]:
    """On a GPU: what the host's times are, and whether the smallest tensors stay in its cache."""
    cache = result.get("cache_bytes")
    if not cache:
        return []
    notes = ["host: what it takes to queue a call; above the call's time, launches are the limit"]
    if smallest_bytes <= cache:
        notes.append(f"tensors of up to {cache / 1e6:.0f} MB stay in the GPU's cache between calls")
    return notes


def ranged(value: Named | None, scale: float = 1.0) -> str:
    """The text 1.02 [0.99, 1.05], or what is known of it."""
    known = as_interval(value).scaled(scale)
    if math.isnan(known.mid):
        return "-"
    ends = "" if math.isnan(known.lo) else f" [{known.lo:.3g}, {known.hi:.3g}]"
    return f"{known.mid:.3g}{ends}"


def as_interval(value: Named | None) -> Interval:
    """NaN where nothing is known."""
    known = value or {}
    low, middle, high = (known.get(key) for key in ("low", "median", "high"))
    return Interval(*(math.nan if x is None else x for x in (low, middle, high)))


def machine(result: dict[str, Any]) -> str:
    """On what a result was measured, in a line."""
    where = result["environment"]
    device = ", ".join(sorted(set(where["gpus"]))) or f"{where['cpu']}, {where['num_cores']} cores"
    ranks = (
        f"{result['world_size']} ranks over {result['backend']} · " if "backend" in result else ""
    )
    return f"{ranks}{device} · torch {where['torch']}"


def about(result: dict[str, Any]) -> list[str]:
    """The footer's last paragraphs: the command, and how ranks were emulated, if they were."""
    how = result["emulation"]
    return [result["command"], "" if how == "none" else f"emulated: {how}"]
