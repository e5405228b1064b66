"""Differences between two studies of the same points: which is faster, if that can be told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lab.analysis.leaders import ERRORS
from lab.analysis.records import Cell
from lab.analysis.speedup import Row
from lab.measure.intervals import Interval, of_ratio

Place = tuple[str, str, int, int]  # series, scaling, ranks and batch
Finding = Literal["faster", "slower", "not distinguishable", "too few repeats"]


@dataclass(frozen=True)
class Difference:
    """A point that two studies have measured.

    Attributes:
        row: of the second study.
        ratio: its step over the first one's, paired by repeat; at the level of `differences`.
        finding: about the second study.
    """

    row: Row
    ratio: Interval
    finding: Finding


def differences(first: Sequence[Row], second: Sequence[Row], floor: float) -> list[Difference]:
    """Compare the points that two studies share.

    As all points are looked at, each interval has the level at which any of them errs in at most
    ERRORS of pairs of studies (Bonferroni). So of two studies of the same thing one is called
    faster anywhere in at most 5 %.

    Args:
        floor: the larger noise floor of the two (lab.analysis.noise); NaN if unknown.
    """
    earlier = {place_of(row): row for row in first if row.num_repeats}
    shared = [row for row in second if row.num_repeats and place_of(row) in earlier]
    level = 1 - ERRORS / max(1, len(shared))
    return [_compare(earlier[place_of(row)].steps_s, row, level, floor) for row in shared]


def _compare(before: Mapping[int, float], row: Row, level: float, floor: float) -> Difference:
    pairs = [(time, before[repeat]) for repeat, time in row.steps_s.items() if repeat in before]
    ratio = of_ratio([a for a, _ in pairs], [b for _, b in pairs], level)
    return Difference(row, ratio, _finding(ratio, 0.0 if math.isnan(floor) else floor))


def _finding(ratio: Interval, floor: float) -> Finding:
    if math.isnan(ratio.lo):
        return "too few repeats"
    if ratio.hi < 1 and 1 / ratio.mid - 1 > floor:
        return "faster"
    if ratio.lo > 1 and ratio.mid - 1 > floor:
        return "slower"
    return "not distinguishable"


def place_of(one: Row | Cell) -> Place:
    """Return what tells a point of a study from others."""
    return one.series, one.scaling, one.world_size, one.fixed_batch_size
