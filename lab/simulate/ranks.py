"""Ranks that are not alike: jitter from step to step, and stragglers.

All ranks meet in every exchange, so a step takes as long as on the rank that computes longest in
it: that rank stands for all, and 4096 ranks cost no more to simulate than two.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

CLOSE = 1e-9  # relative; the bisection ends there
STANDARD = NormalDist()


@cache
def slowest_factor(size: int, jitter: float, num_slow: int = 0, slow_factor: float = 1.0) -> float:
    """Return the compute time of the slowest of `size` ranks, in those of a usual rank.

    In each step, each rank's time is drawn from a normal distribution of its own mean; the result
    is the median over steps of the largest.

    Args:
        jitter: standard deviation of a rank's time, relative to its mean.
        num_slow: how many of the ranks take `slow_factor` times as long on average.
    """
    groups = [(size - num_slow, 1.0), (num_slow, slow_factor)]
    means = [mean for number, mean in groups if number]
    if jitter == 0 or size == 1:
        return max(means)
    low, high = max(means), max(means) * (1 + 10 * jitter)
    while high - low > CLOSE * low:
        middle = (low + high) / 2
        below = 1.0  # probability that all ranks are faster than `middle`
        for number, mean in groups:
            below *= STANDARD.cdf((middle / mean - 1) / jitter) ** number
        low, high = (middle, high) if below < 0.5 else (low, middle)
    return high
