"""What is reported of many steps on many ranks."""

from __future__ import annotations

import numpy as np


def step_statistics(step_s: np.ndarray) -> dict[str, float] | None:
    """Statistics over steps of the slowest rank: a step lasts until all ranks have done it.

    Args:
        step_s: seconds, [ranks, timed steps].

    Returns:
        median, p95 and mad (median absolute deviation, unscaled) in seconds; None without steps.
    """
    if step_s.size == 0:
        return None
    slowest = step_s.max(axis=0)
    median = float(np.median(slowest))
    return {
        "median": median,
        "p95": float(np.percentile(slowest, 95)),
        "mad": float(np.median(np.abs(slowest - median))),
    }


def phase_statistics(phase_s: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
    """Median over steps of the mean over ranks, so that phases add up to about a step.

    Args:
        phase_s: seconds, [ranks, timed steps, phases]; NaN where nothing was marked.
        names: of the phases.
    """
    if phase_s.size == 0 or np.isnan(phase_s).all():
        return {}
    medians = np.median(np.nan_to_num(phase_s).mean(axis=0), axis=0)
    return dict(zip(names, map(float, medians), strict=True))
