"""Whose turn it is, and what is reported of times that were taken in turns."""

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


def order(num_contestants: int, round_number: int) -> list[int]:
    """Who goes when in a round: drawn anew for each, and the same on all ranks.

    So nothing always runs first, or always after the same other.
    """
    return np.random.default_rng(round_number).permutation(num_contestants).tolist()


def middle(times: Times) -> dict[str, float]:
    """Median and median absolute deviation (unscaled)."""
    median = float(np.median(times))
    return {"median": median, "mad": float(np.median(np.abs(np.asarray(times) - median)))}


def interval(statistic: Callable[..., Any], *samples: Times) -> dict[str, float | None]:
    """A statistic of the samples' medians with its bootstrap interval, which draws whole rounds.

    Args:
        statistic: see lab.measure.intervals.of_medians.
        samples: equally long; values at the same position are of the same round.

    Returns:
        median, low and high; None where a value is not finite.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Interval = of_medians(statistic, *samples)  # type: ignore[arg-type]
    named = {"median": found.mid, "low": found.lo, "high": found.hi}
    return {name: value if math.isfinite(value) else None for name, value in named.items()}


def ratio(times: Times, reference: Times) -> dict[str, float | None]:
    """times / reference, see `interval`."""
    return interval(lambda a, b: a / b, times, reference)


def progress(rounds: Iterable[T], rank: int, total: int | None = None) -> Iterable[T]:
    """The rounds, with a bar on rank 0; seldom drawn where nobody looks."""
    every_s = 0.5 if sys.stderr.isatty() else 10
    return tqdm(rounds, total=total, disable=rank != 0, mininterval=every_s, unit="round")
