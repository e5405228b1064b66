"""The verdict on a study: two sentences with figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lab.analysis.compare import leaders
from lab.analysis.points import CEILING, Place, Point
from lab.measure.intervals import ENOUGH_REPEATS, of_ratio
from lab.web.tables import interval_text, percent_text

Reasons = Mapping[Place, str]


def verdict(points: Sequence[Point], floor: float, reasons: Reasons) -> list[str]:
    """Say what is fastest, how sure that is, and why it is not faster.

    The place is that with the most ranks, of those the largest batch, and of several models or
    links there that with the most series.

    Args:
        floor: the study's noise floor.
        reasons: what holds a point back.
    """
    running = [point for point in points if point.num_repeats and point.strategy != CEILING]
    if not running:
        of_none = sum(point.num_repeats > 0 for point in points)
        if not of_none:
            return ["No run has finished."]
        return [f"Only {CEILING} was measured, at {of_none} points: there is no exchange to judge."]
    size = max((point.world_size, point.fixed_batch_size) for point in running)
    here = [point for point in running if (point.world_size, point.fixed_batch_size) == size]
    context = Counter(point.context for point in here).most_common(1)[0][0]
    here = [point for point in here if point.context == context]
    return [_fastest(here, floor), *_why(here, reasons)]


def _fastest(points: Sequence[Point], floor: float) -> str:
    ordered = sorted(points, key=lambda point: point.step_s)
    best, first = ordered[0], leaders(points, floor)
    ranks = f"{best.world_size} rank{'s' if best.world_size > 1 else ''}"
    batch = "batch" if best.scaling == "strong" else "a per-rank batch of"
    place = f"On {ranks} at {batch} {best.fixed_batch_size}"
    speed = f"{1e3 * best.step_s:.3g} ms a step{_speedup(best)}, n = {best.num_repeats}"
    if len(ordered) == 1:
        return f"{place}, {best.label} takes {speed}; nothing else was measured there."
    if best.num_repeats < ENOUGH_REPEATS:
        return (
            f"{place}, {best.label} was the fastest of {len(ordered)} ({speed}), but fewer than "
            f"{ENOUGH_REPEATS} repeats cannot tell whether by chance."
        )
    others = [point.label for point in points if point.series in first and point is not best]
    if others:
        return (
            f"{place}, {best.label} was the fastest of {len(ordered)} ({speed}), "
            f"not distinguishable from {_listed(others)}."
        )
    second = ordered[1]
    shared = [key for key in best.steps_s if key in second.steps_s]
    gain = of_ratio([second.steps_s[k] for k in shared], [best.steps_s[k] for k in shared])
    return (
        f"{place}, {best.label} is the fastest of {len(ordered)} ({speed}): "
        f"the step of {second.label}, the next, takes {percent_text(gain)} longer."
    )


def _speedup(point: Point) -> str:
    if math.isnan(point.speedup.mid) or point.world_size == 1:
        return ""
    text = interval_text(point.speedup, digits=3)
    return f", {text} times as fast as one rank"


def _why(points: Sequence[Point], reasons: Reasons) -> list[str]:
    best = min(points, key=lambda point: point.step_s)
    reason = reasons.get(best.place)
    return [f"Why it is not faster: {reason}."] if reason else []


def _listed(names: Sequence[str]) -> str:
    most = 4
    more = f" and {len(names) - most} others" if len(names) > most else ""
    return ", ".join(names[:most]) + more
