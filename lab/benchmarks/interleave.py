"""Interleave trials in a random order, and compute statistics of their times."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lab.measure.intervals import Interval, of_medians

T = TypeVar("T")
Times = Sequence[float] | NDArray[np.float64]


def order(num_candidates: int, round_number: int) -> list[int]:
    """Draw the order of a round, the same on all ranks.

    The order differs between rounds, so that no candidate always runs first or after the same one.
    """
    return np.random.default_rng(round_number).permutation(num_candidates).tolist()


def middle(times: Times) -> dict[str, float]:
    """Compute the median and the median absolute deviation (unscaled)."""
    median = float(np.median(times))
    return {"median": median, "mad": float(np.median(np.abs(np.asarray(times) - median)))}


def interval(statistic: Callable[..., Any], *samples: Times) -> dict[str, float | None]:
    """Compute a statistic of the samples' medians, with a bootstrap interval over whole rounds.

    Args:
        statistic: see lab.measure.intervals.of_medians.
        samples: equally long; values at the same position are of the same round.

    Returns:
        median, low and high; None where a value is not finite.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds: Interval = of_medians(statistic, *samples)  # type: ignore[arg-type]
    named = {"median": bounds.mid, "low": bounds.lo, "high": bounds.hi}
    return {name: value if math.isfinite(value) else None for name, value in named.items()}


def ratio(times: Times, reference: Times) -> dict[str, float | None]:
    """Compute times / reference; see `interval`."""
    return interval(lambda a, b: a / b, times, reference)


def progress(rounds: Iterable[T], rank: int, total: int | None = None) -> Iterable[T]:
    """Iterate over the rounds, with a progress bar on rank 0; drawn rarely without a terminal."""
    every_s = 0.5 if sys.stderr.isatty() else 10
    return tqdm(rounds, total=total, disable=rank != 0, mininterval=every_s, unit="round")
