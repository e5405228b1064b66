"""The noise floor of a study: the differences between copies of one computation.

On one rank, strategies that send gradients as they are have nothing to send, so all of them compute
the same. Their step times differ by noise alone, including what repeats of one cell share.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from lab.analysis.points import Point, is_copy
from lab.measure.intervals import quantile

ENOUGH = 3  # degrees of freedom; fewer would give a floor of any height


def noise_floor(points: Iterable[Point]) -> float:
    """Return the relative difference that two copies exceed by chance in 5 % of comparisons.

    Copies are one-rank points of the same batch and model; a copy's time is the geometric mean of
    its repeats. NaN if there are too few copies.
    """
    groups: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    for point in points:
        if is_copy(point) and (times := point.step_s()):
            groups[point.context()].append(float(np.mean(np.log(list(times.values())))))
    return _floor(list(groups.values()))


def floor_text(floor: float) -> str:
    """Describe the noise floor; empty if it is unknown."""
    if math.isnan(floor):
        return ""
    return (
        f"noise floor {100 * floor:.1f} %: copies of one computation, on one rank, differ by as "
        "much; no smaller difference in step time counts"
    )


def _floor(groups: Sequence[Sequence[float]]) -> float:
    """Pool the variance of the logarithms over groups."""
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < ENOUGH:
        return math.nan
    squares = sum(float(np.sum((np.array(group) - np.mean(group)) ** 2)) for group in groups)
    return math.expm1(quantile(freedom) * math.sqrt(2 * squares / freedom))
