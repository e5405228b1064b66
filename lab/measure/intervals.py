"""Student's t intervals over repeats, of ratios, differences and levels.

Repeats are few, so nothing that resamples them can hold its level: a percentile bootstrap of three
covers 75 % instead of 95. The t interval of paired values needs no more than differences that
are about symmetric, which they are if both sides share one kind of noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

LEVEL = 0.95
ENOUGH_REPEATS = 3  # two would give an interval, thirteen standard errors wide


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; `lo` and `hi` are NaN where values are too few."""

    lo: float
    mid: float
    hi: float

    @classmethod
    def read(cls, value: Mapping[str, float | None] | None) -> Interval:
        """Read a bench's {median, low, high} from JSON; what is missing or null is NaN."""
        known = value or {}
        ends = (known.get(key) for key in ("low", "median", "high"))
        return cls(*(math.nan if end is None else end for end in ends))

    def scaled(self, factor: float) -> Interval:
        """Scale value and interval by a positive `factor`."""
        return Interval(self.lo * factor, self.mid * factor, self.hi * factor)


UNKNOWN = Interval(math.nan, math.nan, math.nan)


def of_level(values: Sequence[float]) -> Interval:
    """Compute the geometric mean of positive values, one for each repeat.

    Noise that only slows down, such as stalls, makes single values skewed: then this interval
    covers less than its level (docs/measuring.md), and `of_ratio` does not.
    """
    return _exponential(student(np.log(values)))


def of_ratio(
    numerators: Sequence[float], denominators: Sequence[float], level: float = LEVEL
) -> Interval:
    """Compute the geometric mean of paired ratios of positive values.

    Args:
        numerators, denominators: equally long; values at the same position were measured one
            after the other, so drift that both share cancels.
    """
    return _exponential(student(np.log(numerators) - np.log(denominators), level))


def of_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Compute the mean of first - second, paired as in `of_ratio`."""
    return student(np.subtract(first, second))


def student(values: NDArray[np.float64], level: float = LEVEL) -> Interval:
    """Compute a mean with Student's t interval.

    Returns:
        All NaN for no values; no ends for fewer than ENOUGH_REPEATS.
    """
    count = len(values)
    if count == 0:
        return UNKNOWN
    middle = float(np.mean(values))
    if count < ENOUGH_REPEATS:
        return Interval(math.nan, middle, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    half = quantile(count - 1, level) * error
    return Interval(middle - half, middle, middle + half)


def wilson(count: int, total: int, level: float = LEVEL) -> dict[str, float | None]:
    """Compute a share with Wilson's score interval (Wilson 1927), which holds near 0 and 1 too.

    Returns:
        median (the share itself), low and high, as of a bench; None for no trials.
    """
    if total == 0:
        return {"median": None, "low": None, "high": None}
    z, share = float(ndtri((1 + level) / 2)), count / total
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    return {"median": share, "low": max(0.0, middle - half), "high": min(1.0, middle + half)}


def quantile(degrees_of_freedom: int, level: float = LEVEL) -> float:
    """Return how many standard errors lie between the middle and an end of a t interval."""
    return float(stdtrit(degrees_of_freedom, (1 + level) / 2))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values; NaN for none."""
    return of_level(values).mid


def _exponential(interval: Interval) -> Interval:
    return Interval(*map(math.exp, (interval.lo, interval.mid, interval.hi)))
