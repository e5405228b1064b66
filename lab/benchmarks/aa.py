"""Compare candidates with equal ones (an A/A test): how often `step` calls equals different.

A pair is built and timed as by `step`, so its difference has all that such a comparison may mistake
for one: drift, order, the layout of memory. Pairs of a start follow each other in the same ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab.benchmarks import harness, present
from lab.benchmarks.request import BenchRequest
from lab.benchmarks.step import in_order
from lab.distributed.world import World
from lab.draw.chart import looks_of
from lab.draw.plots import Axis, lines
from lab.measure.statistics import ENOUGH_REPEATS, LEVEL, student, wilson
from lab.settings.streams import progress

LEVELS = (0.5, 0.8, 0.9, LEVEL, 0.99)
STEP, WALL, WITHIN = "between starts", "between starts, wall clock", "within one start"
BESIDE = {STEP: -0.6, WALL: 0.6, WITHIN: 0.0}  # of its level a mark is drawn, in %, to be seen


@harness.on_ranks
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    """Measure `pairs` pairs of each variant in one start, one pair after another."""
    seed, numbers = request.own["order_seed"], range(request.own["pairs"])
    found: dict[str, Any] = {}
    for variant, own in zip(request.variants, harness.worlds_of(request, world), strict=True):
        worlds, configs = [own, harness.join(variant.config)], [variant.config] * 2
        pairs = [
            # Of each pair too, consecutive starts have the one order and then the other.
            _pair(*in_order(configs, worlds, seed + 2 * number, shows=False)[2:])
            for number in progress(numbers, "pair", world.rank == 0)
        ]
        found[variant.label] = {key: [pair[key] for pair in pairs] for key in pairs[0]}
    return _judged([{"order_seed": seed, "pairs": found}])


def _pair(turn_s: NDArray[np.float64], step_s: NDArray[np.float64]) -> dict[str, float | None]:
    """Compare the two of a pair, from seconds of a step, [2, turns], as `step` does."""
    ratio, wall = harness.ratio(*step_s), float(turn_s[0].mean() / turn_s[1].mean())
    return {
        "ratio": ratio["median"],
        "wall_ratio": wall,
        "low": ratio["low"],
        "high": ratio["high"],
    }


def combine(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Judge each pair by all starts of it, as `step` does."""
    return {**starts[0], **_judged([one for each in starts for one in each["starts"]])}


def _judged(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Count differences that intervals claim; each of these is false.

    Returns:
        `starts` as given, and a row for each candidate and kind of interval: the number of pairs,
        of those that it calls different, and for each level the share of intervals that hold 1.
    """
    rows: list[dict[str, Any]] = []
    for name in starts[0]["pairs"]:
        pairs = [start["pairs"][name] for start in starts]
        if len(starts) >= ENOUGH_REPEATS:
            for kind, key in ((STEP, "ratio"), (WALL, "wall_ratio")):
                logs = np.log([each[key] for each in pairs]).T  # [pairs, starts]
                rows.append({"name": name, "kind": kind, **_between(logs)})
        rows.append({"name": name, "kind": WITHIN, **_within(pairs)})
    return {"rows": rows, "starts": starts}


def _between(logs: NDArray[np.float64]) -> dict[str, Any]:
    """Judge pairs by logarithms of their ratios, [pairs, starts]."""
    found = {level: [student(each, level) for each in logs] for level in LEVELS}
    held = {level: [one.lo <= 0 <= one.hi for one in each] for level, each in found.items()}
    return _counts(held, [(math.exp(one.hi) - math.exp(one.lo)) / 2 for one in found[LEVEL]])


def _within(pairs: Sequence[dict[str, list[float | None]]]) -> dict[str, Any]:
    """Judge pairs by each start's own interval, of resampled rounds; few rounds have none."""
    ends = [
        (low, high)
        for each in pairs
        for low, high in zip(each["low"], each["high"], strict=True)
        if low is not None and high is not None
    ]
    held = {LEVEL: [low <= 1 <= high for low, high in ends]}
    return _counts(held, [(high - low) / 2 for low, high in ends])


def _counts(held: dict[float, list[bool]], half_widths: list[float]) -> dict[str, Any]:
    at_level = held[LEVEL]
    return {
        "num_pairs": len(at_level),
        "num_different": at_level.count(False),
        "half_width": median(half_widths) if half_widths else None,
        "covered": [
            {"level": level, **wilson(each.count(True), len(each))} for level, each in held.items()
        ],
    }


COLUMNS: dict[str, present.Column] = {
    "": present.text("name"),
    "intervals of 95 %": present.text("kind"),
    "pairs": present.text("num_pairs"),
    "called different": present.text("num_different"),
    "contain 1 (%)": lambda row: present.ranged(
        next(each for each in row["covered"] if each["level"] == LEVEL), 100
    ),
    "half width (%)": present.number("half_width", 100, 1),
}


def notes(result: dict[str, Any]) -> list[str]:
    seeds = present.span([start["order_seed"] for start in result["starts"]], "d")
    return [
        f"pairs of equal candidates {present.on_ranks_of(result)}, so any difference found is a "
        f"false alarm; order_seed={seeds}",
        f"between starts: Student's t over {len(result['starts'])} starts of each pair, as in "
        "step; within one start: rounds are resampled for each start, as in step starts=1",
        "contain 1: share of the intervals that contain a ratio of 1, with Wilson's interval; "
        "half width: the median half width of a ratio's interval",
    ]


def chart(result: dict[str, Any]) -> present.Drawn:
    """Draw the share of intervals that hold 1 over the share that should."""
    several = len({row["name"] for row in result["rows"]}) > 1
    data: Any = pd.DataFrame(
        {
            "series": f"{row['name']}, {row['kind']}" if several else row["kind"],
            "x": 100 * each["level"],
            "at": 100 * each["level"] + BESIDE[row["kind"]],
            "ideal": 100 * each["level"],
            **present.ends(each, 100),
        }
        for row in result["rows"]
        for each in row["covered"]
        if each["median"] is not None
    )
    first = result["rows"][0]
    count, total = first["num_different"], first["num_pairs"]
    message = f"{count} of {total} pairs of equal candidates differ significantly at the 95 % level"
    about = (
        f"{first['kind']} · {present.machine(result)} · {len(result['starts'])} starts; dotted: "
        "expected"
    )
    x = Axis("confidence level (%)", ticks=[100 * each for each in LEVELS], domain=(45, 102))
    y = Axis("intervals that contain 1 (%)", domain=(0, 100))
    return message, [about], lines(data, x, y, looks_of(data["series"]), reference="ideal")
