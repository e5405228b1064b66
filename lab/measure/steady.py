"""When warm-up ends: the step from which on step time is steady."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

FIRST = 5  # steps that are never counted: memory is allocated, buckets are planned
BATCH = 5  # steps that the test averages
FEWEST = 4 * BATCH  # steps that the test needs beyond FIRST


@dataclass(frozen=True)
class Warmup:
    """The first steps of a run, which statistics leave out.

    Attributes:
        num_steps: number of steps left out.
        reason: why so many, in a clause.
    """

    num_steps: int
    reason: str


def least_warmup(asked: int | None) -> int:
    """Return how many steps to leave out where nothing tests whether later ones are steady."""
    return FIRST if asked is None else asked


def warmup_of(step_s: np.ndarray, asked: int | None, every: int = 1, trials: int = 0) -> Warmup:
    """Decide how many of a run's first steps are warm-up.

    By the rule MSER-5 (K. P. White, An Effective Truncation Heuristic for Bias Reduction in
    Simulation Output, Simulation 69, 1997; in batches of five by J. R. Spratt): that many are cut
    which leave the mean of all later steps the least standard error, at most half. The rule sees
    logarithms, so that a stall counts as a slow step and not as ten.

    Args:
        step_s: seconds, [ranks, steps]; a step lasts until the slowest rank has finished it.
        asked: number of steps that the user asked to leave out; None: until steady.
        every: steps from one exchange to the next; a batch holds whole rounds of them.
        trials: first steps in which an exchange tried others; these are warm-up in any case.
    """
    if trials > (asked or 0) and (asked is not None or trials >= step_s.shape[1]):
        return Warmup(trials, f"the exchange tried others in the first {trials}")
    if asked is not None:
        return Warmup(asked, f"warmup_steps={asked}")
    size = every * math.ceil(BATCH / every)
    least = max(FIRST, trials)
    first = size * math.ceil(least / size)
    later = step_s.max(axis=0)[first:] if len(step_s) else np.empty(0)
    num_batches = len(later) // size
    if num_batches * BATCH < FEWEST:
        return Warmup(least, f"the first {least}; too few follow for a test of steadiness")
    batches = np.log(later[: num_batches * size]).reshape(num_batches, size).mean(axis=1)
    errors = [np.var(batches[cut:]) / (num_batches - cut) for cut in range(num_batches // 2 + 1)]
    cut = int(np.argmin(errors))
    if cut == num_batches // 2:
        return Warmup(first + cut * size, "half of the steps, at most; it may not be steady yet")
    return Warmup(first + cut * size, f"steady from there on (MSER-{size})")
