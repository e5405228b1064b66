"""Learning curves of a study: training loss and a test metric, of one run per series."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lab.analysis.records import Cell
from lab.analysis.sheet import NothingToDraw, Sheet
from lab.analysis.speedup import CEILING
from lab.settings.reading import DamagedFile
from lab.task.metrics import LOGARITHMIC, axis, main_metric, metrics_of

NUM_DRAWN, NUM_SMOOTHED = 400, 50


@dataclass(frozen=True)
class Curves:
    """The learning curves of one run: tables by name, with columns step, seconds and value."""

    cell: Cell
    tables: dict[str, pd.DataFrame]


def curves_of(sheet: Sheet) -> tuple[list[Curves], dict[str, bool]]:
    """Read the curves of `convergence`, and their kinds: whether each has a logarithmic axis.

    Raises:
        NothingToDraw: as there.
    """
    runs = _representatives(sheet)
    metric = _metric(runs)
    label, factor = axis(metric)
    sources = {"training loss": _losses, label: lambda run: _evaluated(run, metric, factor)}
    try:
        curves = [Curves(run, {kind: read(run) for kind, read in sources.items()}) for run in runs]
    except DamagedFile as error:
        raise NothingToDraw(str(error)) from None
    kinds = [kind for kind in sources if any(_changes(one.tables[kind]) for one in curves)]
    if not kinds:
        raise NothingToDraw("no losses and no evaluations that change")
    return curves, {kind: kind == label and metric in LOGARITHMIC for kind in kinds}


def _representatives(sheet: Sheet) -> list[Cell]:
    done = [
        cell
        for cell in sheet.study.cells
        if (cell.status, cell.measure, cell.scaling) == ("done", "throughput", sheet.scaling)
        and (cell.strategy != CEILING or cell.world_size == 1)
    ]
    if not done:
        raise NothingToDraw("no finished throughput run that trains one model")
    largest = max((cell.world_size, cell.fixed_batch_size) for cell in done)
    here = [cell for cell in done if (cell.world_size, cell.fixed_batch_size) == largest]
    here.sort(key=lambda cell: (cell.repeat, cell.started_at))
    first = {cell.series: cell for cell in reversed(here)}
    return [first[name] for name in sheet.looks if name in first]


def _losses(cell: Cell) -> pd.DataFrame:
    """Average over ranks, smooth by a running mean, and thin to at most `NUM_DRAWN` points."""
    steps = cell.steps()
    if steps is None or bool(np.isnan(steps["loss"].to_numpy(float)).all()):
        return pd.DataFrame()
    by_step = steps.groupby("step").agg({"end_s": "max", "loss": "mean"}).reset_index()
    window = max(1, len(by_step) // NUM_SMOOTHED)
    by_step["loss"] = by_step["loss"].rolling(window, min_periods=1).mean()
    thin = by_step.iloc[:: math.ceil(len(by_step) / NUM_DRAWN)]
    return thin.rename(columns={"end_s": "seconds", "loss": "value"})


def _changes(table: pd.DataFrame) -> bool:
    """Return whether a curve is more than a level line, as of runs that do not learn."""
    return not table.empty and bool(np.ptp(table["value"]) > 1e-6 * table["value"].abs().max())


def _metric(runs: list[Cell]) -> str:
    """Name the first metric other than the loss in the runs' evaluations; else the loss."""
    return main_metric(name for run in runs for e in run.evaluations for name in metrics_of(e))


def _evaluated(cell: Cell, metric: str, factor: float) -> pd.DataFrame:
    rows = [e for e in cell.evaluations if e.get(metric) is not None]
    table = pd.DataFrame(rows, columns=["step", "seconds", metric])
    return table.assign(value=factor * table[metric].astype(float))
