"""Statistics over steps and ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

STALL = 2.0  # times the median


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
    """Average over rounds, so that each step carries its share of the round's one exchange.

    Args:
        values, first, every: see whole_rounds.

    Returns:
        [ranks, whole rounds, ...]
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

    Args:
        step_s: seconds of each step, [ranks, timed steps].
        gap_s: seconds between each step and the previous one, [ranks, timed steps].
    """
    return float((step_s.sum(axis=1) + gap_s[:, 1:].sum(axis=1)).max())


def phase_statistics(phase_s: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
    """Average phases over ranks and take medians over steps; they add up to about a step.

    Args:
        phase_s: seconds, [ranks, timed steps, phases]; NaN where nothing was marked.
        names: names of the phases.
    """
    if phase_s.size == 0 or np.isnan(phase_s).all():
        return {}
    medians = np.median(np.nan_to_num(phase_s).mean(axis=0), axis=0)
    return dict(zip(names, map(float, medians), strict=True))
