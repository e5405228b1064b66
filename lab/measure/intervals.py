"""Percentile bootstrap intervals (B. Efron and R. Tibshirani, An Introduction to the Bootstrap,
1993, chapter 13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 10_000
SEED = 0
# The interval of a median never leaves [smallest, largest] of n values, and these two enclose
# the true median with probability 1 - 2^(1-n): below six values that is less than 95 %.
ENOUGH_REPEATS = 6


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; `lo` and `hi` are NaN where one value gives no interval."""

    lo: float
    mid: float
    hi: float

    def scaled(self, factor: float) -> Interval:
        """Scale value and interval by a positive `factor`."""
        return Interval(self.lo * factor, self.mid * factor, self.hi * factor)


UNKNOWN = Interval(math.nan, math.nan, math.nan)


def of_medians(
    statistic: Callable[..., NDArray[np.float64]], *samples: Sequence[float]
) -> Interval:
    """Compute a statistic of the samples' medians with its bootstrap interval.

    Values at the same position of different samples were measured one after the other; they are
    resampled together, so shared drift cancels.

    Args:
        statistic: takes one array of medians per sample, shape (resamples,), element by element.
        samples: equally long, one value per repeat, all in one unit.

    Returns:
        All NaN for empty samples; no ends for samples of one value.

    Raises:
        ValueError: samples of different lengths.
    """
    values = np.array(samples, dtype=np.float64)
    num_values = values.shape[1]
    if num_values == 0:
        return UNKNOWN
    middle = float(statistic(*np.median(values, axis=1)))
    if num_values == 1:
        return Interval(math.nan, middle, math.nan)
    picks = np.random.default_rng(SEED).integers(num_values, size=(RESAMPLES, num_values))
    resampled = statistic(*np.median(values[:, picks], axis=2))
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(float(low), middle, float(high))
