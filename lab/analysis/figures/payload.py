"""Figure: bytes that each strategy sends."""

from __future__ import annotations

import math
from collections.abc import Iterable

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from lab.analysis.figures.sheet import emulated_handle, finish, line_handle
from lab.analysis.sheet import NothingToDraw, Sheet, series_of
from lab.analysis.speedup import Row
from lab.draw import style

SPREAD = 0.8
THEORY_LINES = ("--", ":", "-.")


def payload(sheet: Sheet) -> Figure:
    """Draw the payload of a step by world size and series, compared with an fp32 ring.

    A rank of a ring all-reduce sends 2(N-1)/N of the gradient: 8n(N-1)/N bytes for n fp32
    parameters (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms", 2009).

    Raises:
        NothingToDraw: no finished run sent anything.
    """
    rows = _largest_batch(row for row in sheet.rows if row.payload_max_bytes > 0)
    if not rows:
        raise NothingToDraw("no finished run sent anything")
    names, sizes = series_of(rows), style.unique(row.world_size for row in rows)
    width = max(7.0, 0.16 * len(names) * len(sizes) + 5.5)
    figure, axes = style.canvas(1, 1, width, 4.4, sheet.page)
    panel = axes[0][0]
    for row in rows:
        place = (names.index(row.series) + 0.5) / len(names) - 0.5
        _mark(panel, sheet, row, sizes.index(row.world_size) + SPREAD * place)
    theory = _theory(panel, rows, sizes)
    _scale(panel, sizes)
    handles = [*_handles(sheet, names, rows), *theory, *emulated_handle(sheet, bars=False)]
    title = f"Payload handed to the network in a step, {sheet.scaling} scaling"
    note = f"at the largest {sheet.batch_name()}; points that send nothing are not drawn"
    return finish(figure, sheet, title, handles, "counted, not timed", note)


def _largest_batch(rows: Iterable[Row]) -> list[Row]:
    """Keep the row with the largest batch of each series and world size."""
    last = {
        (row.series, row.world_size): row
        for row in sorted(rows, key=lambda row: row.fixed_batch_size)
    }
    return list(last.values())


def _mark(panel: Axes, sheet: Sheet, row: Row, x: float) -> None:
    look = sheet.looks[row.series]
    high, low = 1e-6 * row.payload_max_bytes, 1e-6 * row.payload_min_bytes
    face = "white" if row.emulation else look.colour
    if 0 < low < high:
        panel.plot([x, x], [low, high], color=look.colour, linewidth=1)
        panel.plot(x, low, "_", color=look.colour, ms=8, mew=1.8)
    panel.plot(x, high, look.marker, color=look.colour, markerfacecolor=face, ms=6)


def _theory(panel: Axes, rows: list[Row], sizes: list[int]) -> list[Artist]:
    """Draw the ring's payload across each world size, per model size; return the legend."""
    handles: list[Artist] = []
    known = {row.num_parameters for row in rows if row.num_parameters > 0}
    for index, parameters in enumerate(sorted(known, reverse=True)):
        line = THEORY_LINES[index % len(THEORY_LINES)]
        for place, size in enumerate(sizes):
            height = 8e-6 * parameters * (size - 1) / size
            if height:
                ends = (place - SPREAD / 2, place + SPREAD / 2)
                panel.hlines(height, *ends, color=style.GREY, ls=line, lw=1.2, zorder=1)
        text = f"fp32 ring, 8n(N\N{MINUS SIGN}1)/N,\nn = {1e-6 * parameters:.3g} M parameters"
        handles.append(Line2D([], [], color=style.GREY, linestyle=line, label=text))
    return handles


def _scale(panel: Axes, sizes: list[int]) -> None:
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.grid(axis="y", linewidth=0.4)
    panel.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    panel.set_xlim(-0.5, len(sizes) - 0.5)
    panel.set(xlabel="ranks", ylabel="payload per step, busiest rank (MB)")


def _handles(sheet: Sheet, names: list[str], rows: list[Row]) -> list[Artist]:
    marks: list[Artist] = []
    for name in names:
        handle = line_handle(sheet, name)
        handle.set_linestyle("")
        marks.append(handle)
    if any(0 < row.payload_min_bytes < row.payload_max_bytes for row in rows):
        marks.append(
            Line2D([], [], color=style.GREY, marker="_", ls="", mew=1.8, label="idlest rank")
        )
    return marks
