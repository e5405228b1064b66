"""Statistics over repeats, steps and ranks, and runs of one start that train in turns.

Over repeats they are Student's t intervals, of ratios, differences and levels. Repeats are few, so
nothing that resamples them can hold its level: a percentile bootstrap of three covers 75 % instead
of 95. The t interval of paired values needs no more than differences that are about symmetric,
which they are if both sides share one kind of noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

LEVEL = 0.95
ENOUGH_REPEATS = 3  # two would give an interval, thirteen standard errors wide
STALL = 2.0  # times the median
FIRST = 5  # steps that are never counted: memory is allocated, buckets are planned
BATCH = 5  # steps that the test averages
FEWEST = 4 * BATCH  # steps that the test needs beyond FIRST


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

    def __format__(self, spec: str) -> str:
        """Write the value, and its interval if it has one: 1.02 [0.99, 1.05]; "-" if unknown.

        Args: spec: of each number, as in f"{interval:.2f}".
        """
        middle = "-" if math.isnan(self.mid) else format(self.mid, spec)
        if math.isnan(self.lo):
            return middle
        return f"{middle} [{format(self.lo, spec)}, {format(self.hi, spec)}]"


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


def wilson(count: int, total: int) -> dict[str, float | None]:
    """Compute a share with Wilson's score interval (Wilson 1927), which holds near 0 and 1 too.

    Returns:
        median (the share itself), low and high, as of a bench; None for no trials.
    """
    if total == 0:
        return {"median": None, "low": None, "high": None}
    z, share = float(ndtri((1 + LEVEL) / 2)), count / total
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    return {"median": share, "low": max(0.0, middle - half), "high": min(1.0, middle + half)}


def quantile(degrees_of_freedom: float, level: float = LEVEL) -> float:
    """Return how many standard errors lie between the middle and an end of a t interval."""
    return float(stdtrit(degrees_of_freedom, (1 + level) / 2))


def jointly(ratio: Interval, count: int, degrees_of_freedom: float = math.inf) -> Interval:
    """Widen one of `count` intervals of ratios, so that all hold at LEVEL together (Bonferroni).

    Args:
        degrees_of_freedom: of its t interval; infinite: normal, as of medians of many rounds.
    """
    widen = quantile(degrees_of_freedom, 1 - (1 - LEVEL) / count) / quantile(degrees_of_freedom)
    low, high = (ratio.mid * (end / ratio.mid) ** widen for end in (ratio.lo, ratio.hi))
    return Interval(low, ratio.mid, high)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values; NaN for none."""
    return of_level(values).mid


def _exponential(interval: Interval) -> Interval:
    return Interval(*map(math.exp, (interval.lo, interval.mid, interval.hi)))


def whole_rounds(values: np.ndarray, first: int, every: int) -> np.ndarray:
    """Select the steps of `values` that belong to whole rounds.

    Args:
        values: one per step, [ranks, steps, ...].
        first: number of the first step. Rounds begin at multiples of `every`.
        every: steps per round.

    Returns:
        [ranks, whole rounds * every, ...]
    """
    begin = -first % every
    num_rounds = max(0, values.shape[1] - begin) // every
    return values[:, begin : begin + num_rounds * every]


def round_means(values: np.ndarray, first: int, every: int) -> np.ndarray:
    """Average over whole rounds, so that each step carries its share of the one exchange.

    Args: see whole_rounds.

    Returns: [ranks, whole rounds, ...]
    """
    whole = whole_rounds(values, first, every)
    return whole.reshape(len(values), -1, every, *values.shape[2:]).mean(axis=2)


def step_statistics(step_s: np.ndarray) -> dict[str, Any] | None:
    """Compute step-time statistics; a step lasts until the slowest rank has finished it.

    Args:
        step_s: seconds, [ranks, timed steps].

    Returns:
        median, p95, mad (median absolute deviation, unscaled) and mean in seconds, and num_stalls,
        the number of steps that took more than STALL times the median; None without steps.
    """
    if step_s.size == 0:
        return None
    slowest = step_s.max(axis=0)
    median = float(np.median(slowest))
    return {
        "median": median,
        "p95": float(np.percentile(slowest, 95)),
        "mad": float(np.median(np.abs(slowest - median))),
        "mean": float(slowest.mean()),
        "num_stalls": int((slowest > STALL * median).sum()),
    }


def wall_seconds(step_s: np.ndarray, gap_s: np.ndarray) -> float:
    """Return wall-clock seconds of all steps on the slowest rank, without pauses.

    Args: seconds of each step, and between it and the previous one, [ranks, timed steps].
    """
    return float((step_s.sum(axis=1) + gap_s[:, 1:].sum(axis=1)).max())


def phase_statistics(phase_s: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
    """Average phases over ranks and take medians over steps; they add up to about a step.

    Args: phase_s: seconds, [ranks, timed steps, phases]; NaN where nothing was marked.
    """
    if phase_s.size == 0 or np.isnan(phase_s).all():
        return {}
    medians = np.median(np.nan_to_num(phase_s).mean(axis=0), axis=0)
    return dict(zip(names, map(float, medians), strict=True))


def noise_scale(
    small: NDArray[np.float64], big: NDArray[np.float64], sizes: tuple[int, int]
) -> Interval:
    """Compute the noise scale from squared norms of the same steps.

    Both parts are averaged over steps before they are divided, because a single step's |G|^2 may
    even be negative. The interval is the jackknife's over steps.

    Args:
        small, big: [steps], squared norms of gradients over the smaller and the larger batch.
        sizes: samples of the two.

    Returns:
        Samples, with the 95 % interval; UNKNOWN for fewer than three steps, or if noise hides the
        gradient altogether.
    """
    if len(small) < 3:
        return UNKNOWN
    b, B = sizes
    squared = (B * big - b * small) / (B - b)  # |G|^2
    spread = (small - big) / (1 / b - 1 / B)  # tr(S)
    if squared.sum() <= 0:
        return UNKNOWN
    n = len(small)
    without = (spread.sum() - spread) / (squared.sum() - squared)
    scale = float(spread.sum() / squared.sum())
    error = math.sqrt((n - 1) / n * float(np.sum((without - without.mean()) ** 2)))
    margin = quantile(n - 1) * error
    return Interval(scale - margin, scale, scale + margin)


@dataclass(frozen=True)
class Warmup:
    """How many first steps of a run statistics leave out, and why so many, in a clause."""

    num_steps: int
    reason: str


def least_warmup(asked: int | None) -> int:
    """Return how many steps to leave out where nothing tests whether later ones are steady."""
    return FIRST if asked is None else asked


def warmup_of(
    step_s: np.ndarray,
    asked: int | None,
    every: int = 1,
    trials: int = 0,
    why: str = "the exchange tried others",
) -> Warmup:
    """Decide how many of a run's first steps are warm-up.

    By the rule MSER-5 (K. P. White, An Effective Truncation Heuristic for Bias Reduction in
    Simulation Output, Simulation 69, 1997; in batches of five by J. R. Spratt): that many are cut
    which leave the mean of all later steps the least standard error, at most half. The rule sees
    logarithms, so that a stall counts as a slow step and not as ten.

    Args:
        step_s: seconds, [ranks, steps]; a step lasts until the slowest rank has finished it.
        asked: number of steps that the user asked to leave out; None: until steady.
        every: steps from one exchange to the next; a batch holds whole rounds of them.
        trials: first steps that are unlike later ones; these are warm-up in any case.
        why: they are so.
    """
    if trials > (asked or 0) and (asked is not None or trials >= step_s.shape[1]):
        return Warmup(trials, f"{why} in the first {trials}")
    if asked is not None:
        return Warmup(asked, f"warmup_steps={asked}")
    size = every * math.ceil(BATCH / every)
    least = max(FIRST, trials)
    first = size * math.ceil(least / size)
    later = step_s.max(axis=0)[first:] if len(step_s) else np.empty(0)
    num_batches = len(later) // size
    if num_batches * BATCH < FEWEST:
        return Warmup(
            least, f"the first {least} steps are warm-up, and too few follow to test for steadiness"
        )
    batches = np.log(later[: num_batches * size]).reshape(num_batches, size).mean(axis=1)
    errors = [np.var(batches[cut:]) / (num_batches - cut) for cut in range(num_batches // 2 + 1)]
    cut = int(np.argmin(errors))
    if cut == num_batches // 2:
        reason = "half of the steps are warm-up, and later ones may not be steady yet"
        return Warmup(first + cut * size, reason)
    return Warmup(first + cut * size, f"steady from there on (MSER-{size})")


@dataclass(frozen=True)
class InterleavedSteps:
    """The steps of a run that takes turns with others, so that drift of the machine favours none.

    The first round of a turn does not count: nothing of its own is under way, and caches hold what
    others left there.

    Attributes:
        alone: first steps, all of warm-up, made before turns begin.
        size: steps of each turn.
        every: steps of a round, from one exchange to the next.
    """

    num_warmup: int
    size: int
    every: int

    def steady_mask(self, num_steps: int) -> NDArray[np.bool_]:
        """Tell which of a run's steps count, [steps]."""
        place = np.arange(num_steps) - self.num_warmup
        return (place >= 0) & (place % self.size >= self.every)

    def seconds(self, round_s: NDArray[np.float64]) -> list[float]:
        """Compute a step's seconds in each turn: the median over its rounds that count.

        Args:
            round_s: mean of a step on each rank, [ranks, rounds that count].
        """
        slowest = round_s.max(axis=0)
        return np.median(slowest.reshape(-1, self.size // self.every - 1), axis=1).tolist()


def order(num_candidates: int, round_number: int) -> list[int]:
    """Draw the order of a round, the same on all ranks.

    The order differs between rounds, so that no candidate always runs first or after the same one.
    """
    return np.random.default_rng(round_number).permutation(num_candidates).tolist()
