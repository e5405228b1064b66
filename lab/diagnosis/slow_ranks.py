"""Slow ranks of a run, from the own times in its steps.parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis.records import Cell
from lab.measure.spans import OWN
from lab.measure.statistics import round_means
from lab.measure.stragglers import Slow, Times, stragglers
from lab.sync.pattern import alike, pattern_of


def slow_ranks(runs: Sequence[Cell], settings: Mapping[str, Any]) -> list[Slow] | None:
    """Find the slow ranks that most of the `runs` of a point show.

    Args:
        settings: the runs' composed settings.

    Returns:
        The longest mean delay first, medians over the runs; None: no run has own times.
    """
    found = list[list[Slow]]()
    for run in runs:
        steps = run.steps()
        if steps is not None and f"own_{OWN[0]}_s" in steps.columns:
            times = own_times(steps, pattern_of(settings).every)
            same = alike(settings, run.payload_bytes_per_step)
            found.append(stragglers(times, run.step_s, same))
    if not found:
        return None
    keys = dict.fromkeys((each.rank, each.phase) for run in found for each in run)
    same = ([s for run in found for s in run if (s.rank, s.phase) == key] for key in keys)
    agreed = (_middle(each) for each in same if len(each) > len(found) / 2)
    return sorted(agreed, key=lambda slow: -slow.mean_s)


def own_times(steps: pd.DataFrame, every: int) -> Times:
    """Return seconds of own work in timed steps, or means over rounds: [ranks, steps, OWN]."""
    timed: Any = steps[steps["timed"]]  # rank by rank, each in the order of its steps
    columns = [f"own_{name}_s" for name in OWN]
    values = timed[columns].to_numpy(float).reshape(timed["rank"].nunique(), -1, len(OWN))
    if every == 1 or not values.size:
        return values
    known = ~np.isnan(values).all(axis=1, keepdims=True)
    filled = np.where(known, np.nan_to_num(values), np.nan)  # most steps exchange nothing
    return round_means(filled, int(timed["step"].min()), every)


def _middle(several: Sequence[Slow]) -> Slow:
    one = several[0]
    delay_s, share, floor_s = (
        float(median(getattr(each, key) for each in several))
        for key in ("delay_s", "share", "floor_s")
    )
    return Slow(one.rank, one.phase, delay_s, share, floor_s)
