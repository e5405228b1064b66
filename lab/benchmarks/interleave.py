"""Trials that take turns: their order, their progress, and their statistics."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lab.measure.turns import order

T = TypeVar("T")
Times = Sequence[float] | NDArray[np.float64]

RESAMPLES, SEED = 10_000, 0
# The interval of a median never leaves [smallest, largest] of n values, and these two enclose
# the true median with probability 1 - 2^(1-n): below six values that is less than 95 %.
ENOUGH_ROUNDS = 6


def turns(num_candidates: int, rounds: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield a candidate and the number of its round, in an order drawn anew for each round.

    It is the same on all ranks.
    """
    for number in rounds:
        for index in order(num_candidates, number):
            yield index, number


def middle(times: Times) -> dict[str, float]:
    """Compute the median and the median absolute deviation (unscaled)."""
    median = float(np.median(times))
    return {"median": median, "mad": float(np.median(np.abs(np.asarray(times) - median)))}


def interval(statistic: Callable[..., Any], *samples: Times) -> dict[str, float | None]:
    """Compute a statistic of the samples' medians, with a percentile bootstrap interval.

    (B. Efron and R. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.) Whole rounds
    are resampled, so drift that a round's trials share cancels.

    Args:
        statistic: takes one array of medians per sample, shape (resamples,), element by element.
        samples: equally long; values at the same position are of the same round.

    Returns:
        median, low and high of 95 %; None where a value is not finite, low and high also for fewer
        than ENOUGH_ROUNDS.
    """
    values = np.array(samples, dtype=np.float64)
    num_rounds = values.shape[1]
    low = high = math.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        middle = float(statistic(*np.median(values, axis=1)))
        if num_rounds >= ENOUGH_ROUNDS:
            picks = np.random.default_rng(SEED).integers(num_rounds, size=(RESAMPLES, num_rounds))
            resampled = statistic(*np.median(values[:, picks], axis=2))
            low, high = map(float, np.percentile(resampled, [2.5, 97.5]))
    named = {"median": middle, "low": low, "high": high}
    return {name: value if math.isfinite(value) else None for name, value in named.items()}


def ratio(times: Times, reference: Times) -> dict[str, float | None]:
    """Compute times / reference; see `interval`."""
    return interval(lambda a, b: a / b, times, reference)


def progress(rounds: Iterable[T], rank: int, total: int | None = None) -> Iterable[T]:
    """Iterate over the rounds, with a progress bar on rank 0; drawn rarely without a terminal."""
    every_s = 0.5 if sys.stderr.isatty() else 10
    return tqdm(rounds, total=total, disable=rank != 0, mininterval=every_s, unit="round")
