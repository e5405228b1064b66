"""Which strategies lead, as far as noise allows to say; the noise floor; two studies compared.

On one rank, strategies that send gradients as they are have nothing to send, so all of them compute
the same. Their step times differ by noise alone, including what repeats of one cell share: the
noise floor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

import numpy as np

from lab.analysis.points import CEILING, Point, is_copy
from lab.measure.statistics import Interval, of_ratio, quantile

ENOUGH_COPIES = 3  # degrees of freedom; fewer would give a floor of any height
ERRORS = 0.04  # share of studies: a little below the promised 5 %, as no noise is quite normal
Times = Mapping[Any, float]  # seconds of a step, by repeat or turn
Finding = Literal["faster", "slower", "not distinguishable", "too few repeats"]


def leaders(points: Iterable[Point], floor: float = math.nan) -> list[str]:
    """List the series of one context and world size that no other has been shown to beat.

    `none` is left out: it is a ceiling that trains no common model.

    Args:
        floor: see noise_floor; NaN if unknown.
    """
    running = {p.series: p.steps_s for p in points if p.strategy != CEILING and p.num_repeats}
    return leaders_of(running, floor)


def leaders_of(steps_s: Mapping[str, Times], floor: float = math.nan) -> list[str]:
    """List the series that no other has been shown to beat.

    A series is beaten if another one's paired step times are shorter by more than the noise floor,
    and the interval of their ratio lies below 1. As all pairs are looked at, each interval has the
    level at which any of them errs in at most ERRORS of studies (Bonferroni): so among equal series
    one is beaten in at most 5 %.
    """
    num_pairs = len(steps_s) * (len(steps_s) - 1) // 2
    level = 1 - ERRORS / max(1, num_pairs)
    beaten = {
        slow
        for fast, slow in permutations(steps_s, 2)
        if _beats(steps_s[fast], steps_s[slow], level, floor)
    }
    return [name for name in steps_s if name not in beaten]


def _beats(fast: Times, slow: Times, level: float, floor: float) -> bool:
    shared = [key for key in fast if key in slow]
    ratio = of_ratio([fast[r] for r in shared], [slow[r] for r in shared], level)
    return ratio.hi < 1 and not 1 / ratio.mid - 1 <= floor


def noise_floor(points: Iterable[Point]) -> float:
    """Return the relative difference that two copies exceed by chance in 5 % of comparisons.

    Copies are one-rank points of the same batch and model; a copy's time is the geometric mean of
    its repeats. NaN if there are too few copies.
    """
    groups: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    for point in points:
        if is_copy(point) and point.steps_s:
            groups[point.context].append(float(np.mean(np.log(list(point.steps_s.values())))))
    return _floor(list(groups.values()))


def floor_text(floor: float) -> str:
    """Describe the noise floor; empty if it is unknown."""
    if math.isnan(floor):
        return ""
    return (
        f"noise floor {100 * floor:.1f} %: repeated one-rank runs differ by this much, so smaller "
        "differences between step times are not significant"
    )


def _floor(groups: Sequence[Sequence[float]]) -> float:
    """Pool the variance of the logarithms over groups."""
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < ENOUGH_COPIES:
        return math.nan
    squares = sum(float(np.sum((np.array(group) - np.mean(group)) ** 2)) for group in groups)
    return math.expm1(quantile(freedom) * math.sqrt(2 * squares / freedom))


@dataclass(frozen=True)
class Difference:
    """A point that two studies have measured.

    Attributes:
        point: of the second study.
        ratio: its step over the first one's, paired by repeat; at the level of `differences`.
        finding: about the second study.
    """

    point: Point
    ratio: Interval
    finding: Finding


def differences(first: Sequence[Point], second: Sequence[Point], floor: float) -> list[Difference]:
    """Compare the points that two studies share.

    As all points are looked at, each interval has the level at which any of them errs in at most
    ERRORS of pairs of studies (Bonferroni). So of two studies of the same thing one is called
    faster anywhere in at most 5 %.

    Args:
        floor: the larger noise floor of the two (noise_floor); NaN if unknown.
    """
    earlier = {point.place: point for point in first if point.num_repeats}
    shared = [point for point in second if point.num_repeats and point.place in earlier]
    level = 1 - ERRORS / max(1, len(shared))
    return [_compare(earlier[point.place].steps_s, point, level, floor) for point in shared]


def _compare(before: Mapping[int, float], point: Point, level: float, floor: float) -> Difference:
    pairs = [(time, before[repeat]) for repeat, time in point.steps_s.items() if repeat in before]
    ratio = of_ratio([a for a, _ in pairs], [b for _, b in pairs], level)
    return Difference(point, ratio, _finding(ratio, 0.0 if math.isnan(floor) else floor))


def _finding(ratio: Interval, floor: float) -> Finding:
    if math.isnan(ratio.lo):
        return "too few repeats"
    if ratio.hi < 1 and 1 / ratio.mid - 1 > floor:
        return "faster"
    if ratio.lo > 1 and ratio.mid - 1 > floor:
        return "slower"
    return "not distinguishable"
