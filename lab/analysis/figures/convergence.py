"""Convergence: training loss, and the task's metric on test samples, over steps and time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from lab.analysis.figures.sheet import NothingToDraw, Sheet, emulated_handle, finish, line_handle
from lab.analysis.records import Cell
from lab.analysis.speedup import CEILING
from lab.draw import style
from lab.draw.looks import Look
from lab.task.metrics import LOGARITHMIC, axis, main_metric, metrics_of

NUM_DRAWN, NUM_SMOOTHED = 400, 50
FEWEST_TICKS = 3  # of a logarithmic axis
AXES = {"step": "step", "seconds": "training time (s)"}


@dataclass(frozen=True)
class Curves:
    """The learning curves of one run: tables by name, with columns step, seconds and value."""

    cell: Cell
    tables: dict[str, pd.DataFrame]


def convergence(sheet: Sheet) -> Figure:
    """Draw training loss and a test metric against steps and seconds, one run per series.

    The point is the one with the most ranks, and of those the largest batch; the run is its
    lowest repeat. `none` has no line at several ranks: its replicas are not one model.

    Raises:
        NothingToDraw: no run of such a point kept losses or evaluations.
    """
    runs = _representatives(sheet)
    metric = _metric(runs)
    label, factor = axis(metric)
    sources = {"training loss": _losses, label: lambda run: _evaluated(run, metric, factor)}
    curves = [Curves(run, {kind: read(run) for kind, read in sources.items()}) for run in runs]
    kinds = [kind for kind in sources if any(not one.tables[kind].empty for one in curves)]
    if not kinds:
        raise NothingToDraw("no losses and no evaluations")
    figure, axes = sheet.canvas(
        len(kinds), 2, 8.6, 2.9 * len(kinds) + 1, sharex="col", sharey="row"
    )
    for line, kind in zip(axes, kinds, strict=True):
        for panel, (key, text) in zip(line, AXES.items(), strict=True):
            for one in curves:
                look = sheet.looks[one.cell.series]
                _draw(panel, one.tables[kind], key, look, bool(one.cell.emulation))
            panel.grid(linewidth=0.4)
            panel.set_xlabel(text if line is axes[-1] else "")
        line[0].set_ylabel(kind)
        if kind == label and metric in LOGARITHMIC:
            make_logarithmic(line[0])
    return _finish(figure, sheet, runs)


def _finish(figure: Figure, sheet: Sheet, runs: list[Cell]) -> Figure:
    one = runs[0]
    title = f"Convergence at {one.world_size} ranks, {sheet.batch_name()} {one.fixed_batch_size}"
    repeats = style.unique(run.repeat for run in runs)
    sample = f"one run per series (repeat {', '.join(map(str, repeats))}): no intervals"
    note = ""
    if one.world_size > 1 and any(row.strategy == CEILING for row in sheet.rows):
        note = "none is left out: its replicas are not one model"
    drawn = {run.series for run in runs}
    absent = sorted({row.series for row in sheet.rows} - drawn) if sheet.study.machines else []
    if absent:
        note = f"not at this point, or not one model: {', '.join(absent)}"
    handles = [line_handle(sheet, run.series) for run in runs]
    hollow = emulated_handle(sheet, bars=False) if any(r.emulation for r in runs) else []
    return finish(figure, sheet, title, [*handles, *hollow], sample, note)


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


def _metric(runs: list[Cell]) -> str:
    """Name the first metric other than the loss in the runs' evaluations; else the loss."""
    return main_metric(name for run in runs for e in run.evaluations for name in metrics_of(e))


def _evaluated(cell: Cell, metric: str, factor: float) -> pd.DataFrame:
    rows = [e for e in cell.evaluations if e.get(metric) is not None]
    table = pd.DataFrame(rows, columns=["step", "seconds", metric])
    return table.assign(value=factor * table[metric].astype(float))


def make_logarithmic(panel: Axes) -> None:
    """Make the vertical axis logarithmic, with labels as on a linear one."""
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    candidates = [np.outer(decades, steps).ravel() for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 6))]
    candidates.append(MaxNLocator(4).tick_values(low, high))
    seen = [ticks[(ticks >= low) & (ticks <= high)] for ticks in candidates]
    panel.set_yticks(next((ticks for ticks in seen if len(ticks) >= FEWEST_TICKS), seen[-1]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(NullLocator())


def _draw(panel: Axes, table: pd.DataFrame, x: str, look: Look, emulated: bool) -> None:
    if table.empty:
        return
    face = "white" if emulated else look.colour
    every = max(1, len(table) // 8)
    panel.plot(
        table[x],
        table["value"],
        color=look.colour,
        linestyle=look.line,
        marker=look.marker,
        markevery=every,
        markerfacecolor=face,
        linewidth=1.2,
        ms=5,
    )
