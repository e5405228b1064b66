"""The verdict on a study: two sentences with figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lab.analysis.differences import Place, place_of
from lab.analysis.leaders import leaders
from lab.analysis.speedup import CEILING, Row
from lab.measure.intervals import ENOUGH_REPEATS, of_ratio
from lab.web.tables import interval_text, percent_text

Reasons = Mapping[Place, str]


def verdict(rows: Sequence[Row], floor: float, reasons: Reasons) -> list[str]:
    """Say what is fastest, how sure that is, and why it is not faster.

    The place is that with the most ranks, of those the largest batch, and of several models or
    links there that with the most series.

    Args:
        floor: the study's noise floor.
        reasons: what holds a point back.
    """
    running = [row for row in rows if row.num_repeats and row.strategy != CEILING]
    if not running:
        of_none = sum(row.num_repeats > 0 for row in rows)
        if not of_none:
            return ["No run has finished."]
        return [f"Only {CEILING} was measured, at {of_none} points: there is no exchange to judge."]
    size = max((row.world_size, row.fixed_batch_size) for row in running)
    here = [row for row in running if (row.world_size, row.fixed_batch_size) == size]
    context = Counter(row.context for row in here).most_common(1)[0][0]
    here = [row for row in here if row.context == context]
    return [_fastest(here, floor), *_why(here, reasons)]


def _fastest(rows: Sequence[Row], floor: float) -> str:
    ordered = sorted(rows, key=lambda row: row.step_s)
    best, first = ordered[0], leaders(rows, floor)
    ranks = f"{best.world_size} rank{'s' if best.world_size > 1 else ''}"
    batch = "batch" if best.scaling == "strong" else "a per-rank batch of"
    place = f"On {ranks} at {batch} {best.fixed_batch_size}"
    speed = f"{1e3 * best.step_s:.4g} ms a step{_speedup(best)}, n = {best.num_repeats}"
    if len(ordered) == 1:
        return f"{place}, {best.series} takes {speed}; nothing else was measured there."
    if best.num_repeats < ENOUGH_REPEATS:
        return (
            f"{place}, {best.series} was the fastest of {len(ordered)} ({speed}), but fewer than "
            f"{ENOUGH_REPEATS} repeats cannot tell whether by chance."
        )
    others = [name for name in first if name != best.series]
    if others:
        return (
            f"{place}, {best.series} was the fastest of {len(ordered)} ({speed}), "
            f"not distinguishable from {_listed(others)}."
        )
    second = ordered[1]
    shared = [key for key in best.steps_s if key in second.steps_s]
    gain = of_ratio([second.steps_s[k] for k in shared], [best.steps_s[k] for k in shared])
    return (
        f"{place}, {best.series} is the fastest of {len(ordered)} ({speed}): "
        f"the step of {second.series}, the next, takes {percent_text(gain)} longer."
    )


def _speedup(row: Row) -> str:
    if math.isnan(row.speedup.mid) or row.world_size == 1:
        return ""
    return f", {interval_text(row.speedup)} times as fast as one rank"


def _why(rows: Sequence[Row], reasons: Reasons) -> list[str]:
    best = min(rows, key=lambda row: row.step_s)
    reason = reasons.get(place_of(best))
    return [f"Why it is not faster: {reason}."] if reason else []


def _listed(names: Sequence[str]) -> str:
    most = 4
    more = f" and {len(names) - most} others" if len(names) > most else ""
    return ", ".join(names[:most]) + more
