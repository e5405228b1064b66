"""The data of a study's figures, and their common parts: legend entries, title and footer."""

from __future__ import annotations

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.analysis.noise import floor_text
from lab.analysis.sheet import Sheet
from lab.analysis.speedup import shared_runs
from lab.draw.style import GREY, HATCH, frame, unique


def line_handle(sheet: Sheet, series: str) -> Line2D:
    """Make the legend entry of a series drawn as a line."""
    look, text = sheet.looks[series], sheet.label(series)
    return Line2D([], [], color=look.colour, ls=look.line, marker=look.marker, label=text)


def emulated_handle(sheet: Sheet, bars: bool) -> list[Artist]:
    """Make the legend entry of emulated points, hatched or hollow; empty without any."""
    if not sheet.emulated():
        return []
    if bars:
        return [Patch(facecolor="white", edgecolor=GREY, hatch=HATCH, label="emulated")]
    hollow = Line2D([], [], color=GREY, marker="o", linestyle="", label="emulated")
    hollow.set_markerfacecolor("white")
    return [hollow]


def finish(
    figure: Figure, sheet: Sheet, title: str, handles: list[Artist], sample: str, notes: str = ""
) -> Figure:
    """Give a study's figure its title, its legend outside the axes and its footer.

    Args:
        figure: with everything drawn; made wider for a legend of long names.
        sheet: the data it was drawn from.
        title: wrapped so that it ends before the legend.
        handles: the legend's entries.
        sample: number of runs behind a point, and the kind of error bars.
        notes: further remarks for the reader.
    """
    how = "; ".join(sheet.emulated())
    floor = floor_text(sheet.floor)
    where = "; ".join(f"on={label}: {text}" for label, text in sheet.study.machines.items())
    emulated = f"emulated: {how}" if how else ""
    context = f"{_context(sheet)} · {sample}"
    footer = [context, where, floor, notes, shared_runs(sheet.rows), emulated]
    return frame(figure, title, handles, footer, sheet.page)


def _context(sheet: Sheet) -> str:
    cells = sheet.study.cells
    shared = [
        f"{key} {', '.join(unique(c.settings[key] for c in cells if key in c.settings))}"
        for key in ("model", "data", *(() if sheet.study.machines else ("device", "machine")))
        if any(key in cell.settings for cell in cells)
    ]
    return " · ".join([f"study {sheet.study.name}", *shared])
