"""Which strategies of a study lead, as far as noise allows to say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

from lab.analysis.speedup import CEILING, Row
from lab.measure.intervals import of_ratio

ERRORS = 0.04  # share of studies: a little below the promised 5 %, as no noise is quite normal
Times = Mapping[Any, float]  # seconds of a step, by repeat or turn


def leaders(rows: Sequence[Row], floor: float = math.nan) -> list[str]:
    """List the series of one context and world size that no other has been shown to beat.

    `none` is left out: it is a ceiling that trains no common model.

    Args:
        floor: see lab.analysis.noise; NaN if unknown.
    """
    running = {r.series: r.steps_s for r in rows if r.strategy != CEILING and r.num_repeats}
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
