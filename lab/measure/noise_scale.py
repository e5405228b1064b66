"""The gradient noise scale: the batch above which more samples buy little.

McCandlish et al., An Empirical Model of Large-Batch Training (2018), appendix A.1: the squared norm
of a gradient over b samples is |G|^2 + tr(S) / b in expectation, so two batch sizes give both parts
without bias. The noise scale tr(S) / |G|^2 is in samples.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lab.measure.intervals import UNKNOWN, Interval, quantile


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
