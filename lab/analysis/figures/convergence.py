"""Convergence: training loss, and the task's metric on test samples, over steps and time."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from lab.analysis.curves import curves_of
from lab.analysis.figures.sheet import emulated_handle, finish, line_handle
from lab.analysis.records import Cell
from lab.analysis.sheet import Sheet
from lab.analysis.speedup import CEILING
from lab.draw import style
from lab.draw.looks import Look

FEWEST_TICKS = 3  # of a logarithmic axis
AXES = {"step": "step", "seconds": "training time (s)"}


def convergence(sheet: Sheet) -> Figure:
    """Draw training loss and a test metric against steps and seconds, one run per series.

    The point is the one with the most ranks, and of those the largest batch; the run is its
    lowest repeat. `none` has no line at several ranks: its replicas are not one model.

    Raises:
        NothingToDraw: no run of such a point kept losses or evaluations.
    """
    curves, kinds = curves_of(sheet)
    figure, axes = style.canvas(
        len(kinds), 2, 8.6, 2.9 * len(kinds) + 1, sheet.page, sharex="col", sharey="row"
    )
    for line, kind in zip(axes, kinds, strict=True):
        for panel, (key, text) in zip(line, AXES.items(), strict=True):
            for one in curves:
                look = sheet.looks[one.cell.series]
                _draw(panel, one.tables[kind], key, look, bool(one.cell.emulation))
            panel.grid(linewidth=0.4)
            panel.set_xlabel(text if line is axes[-1] else "")
        line[0].set_ylabel(kind)
        if kinds[kind]:
            make_logarithmic(line[0])
    return _finish(figure, sheet, [one.cell for one in curves])


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


def make_logarithmic(panel: Axes) -> None:
    """Make the vertical axis logarithmic, with labels as on a linear one."""
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    candidates = [np.outer(decades, steps).ravel() for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 6))]
    candidates.append(np.array(MaxNLocator(4).tick_values(low, high)))
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
