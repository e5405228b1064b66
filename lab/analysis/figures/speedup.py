"""Speedup, efficiency and throughput against the number of ranks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.analysis.figures.sheet import emulated_handle, finish, line_handle
from lab.analysis.sheet import NothingToDraw, Sheet, baselines, repeats, series_of, with_speedup
from lab.analysis.speedup import Row, prediction_of, unit_of
from lab.draw import style
from lab.measure.intervals import Interval
from lab.task.metrics import heading, main_metric

MOST_COLUMNS = 4
TITLE_LETTERS, PAPER_LETTERS = 32, 24  # of a line above a panel


def speedup_bars(sheet: Sheet) -> Figure:
    """Draw a panel per series, a group per batch, a bar per world size.

    The layout is that of H. Kim et al., "Performance Analysis of CNN Frameworks for GPUs",
    ISPASS 2017, slide 26.
    """
    rows = with_speedup(sheet)
    series, sizes = series_of(rows), style.unique(row.world_size for row in rows)
    batch_sizes = style.unique(row.fixed_batch_size for row in rows)
    lines = math.ceil(len(series) / sheet.page.num_columns(MOST_COLUMNS))
    columns = math.ceil(len(series) / lines)
    figure, axes = style.canvas(
        lines, columns, 2.6 * columns + 1.6, 2.6 * lines + 1, sheet.page, sharey=True
    )
    panels = [panel for line in axes for panel in line]
    for panel, name in zip(panels, series, strict=False):
        _panel(panel, sheet, [row for row in rows if row.series == name], sizes, batch_sizes)
    for panel in panels[len(series) :]:
        panel.remove()
    for index in range(len(series)):
        panels[index].set_xlabel(sheet.batch_name() if index + columns >= len(series) else "")
    for line in axes:
        line[0].set_ylabel("speedup")
    shades = [
        Patch(facecolor=_shade(style.GREY, sizes, size), edgecolor="black", label=_ranks(size))
        for size in sizes
    ]
    handles: list[Artist] = [*shades, *emulated_handle(sheet, bars=True)]
    title = f"Speedup over {baselines(rows)}, {sheet.scaling} scaling"
    return finish(figure, sheet, title, handles, repeats(rows))


def scaling(sheet: Sheet) -> Figure:
    """Draw speedup above efficiency, against world size; one column per batch."""
    rows = with_speedup(sheet)
    batch_sizes = style.unique(row.fixed_batch_size for row in rows)
    figure, axes = style.canvas(
        2, len(batch_sizes), _width(batch_sizes), 6, sheet.page, sharex=True, sharey="row"
    )
    sizes = style.unique(row.world_size for row in rows)
    for column, batch_size in enumerate(batch_sizes):
        here = [row for row in rows if row.fixed_batch_size == batch_size]
        top, bottom = axes[0][column], axes[1][column]
        top.plot(sizes, sizes, color=style.GREY, linestyle=":", linewidth=1)
        bottom.axhline(1, color=style.GREY, linestyle=":", linewidth=1)
        _lines(top, sheet, here, lambda row: row.speedup)
        _lines(bottom, sheet, here, lambda row: row.efficiency)
        top.set_title(f"{sheet.batch_name()} {batch_size}")
        bottom.set_xlabel("ranks")
    for line in axes:
        line[0].set_ylim(bottom=0)  # last: it ends autoscaling of all axes that share it
    axes[0][0].set_ylabel("speedup")
    axes[1][0].set_ylabel("efficiency (speedup / ranks)")
    ideal = Line2D([], [], color=style.GREY, linestyle=":", label="ideal")
    title = f"Speedup and efficiency over {baselines(rows)}, {sheet.scaling} scaling"
    handles = [*_handles(sheet, rows), ideal]
    return finish(figure, sheet, title, handles, repeats(rows))


def throughput(sheet: Sheet) -> Figure:
    """Draw samples per second against world size; one column per batch."""
    rows = [row for row in sheet.from_one_rank() if not math.isnan(row.samples_per_s.mid)]
    if not rows:
        raise NothingToDraw("no record gives samples_per_s")
    batch_sizes = style.unique(row.fixed_batch_size for row in rows)
    figure, axes = style.canvas(
        1, len(batch_sizes), _width(batch_sizes), 3.8, sheet.page, sharey=True
    )
    for panel, batch_size in zip(axes[0], batch_sizes, strict=True):
        _lines(
            panel,
            sheet,
            [r for r in rows if r.fixed_batch_size == batch_size],
            lambda row: row.samples_per_s,
        )
        panel.set_title(f"{sheet.batch_name()} {batch_size}")
        panel.set_xlabel("ranks")
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel(f"{unit_of(rows)}s/s, all ranks")
    prediction, each = prediction_of(rows)
    if each > 1:
        scales = (lambda rate: rate * each, lambda rate: rate / each)
        axes[0][-1].secondary_yaxis("right", functions=scales).set_ylabel(f"{prediction}s/s")
    title = f"Throughput, {sheet.scaling} scaling"
    return finish(figure, sheet, title, _handles(sheet, rows), repeats(rows))


def _width(batch_sizes: list[int]) -> float:
    """Return the inches for a column per batch and the legend."""
    return max(7.0, 2.8 * len(batch_sizes) + 2.4)


def _panel(
    panel: Axes, sheet: Sheet, rows: list[Row], sizes: list[int], batch_sizes: list[int]
) -> None:
    colour, width = sheet.looks[rows[0].series].colour, 0.8 / len(sizes)
    for row in rows:
        x = (
            batch_sizes.index(row.fixed_batch_size)
            + (sizes.index(row.world_size) - (len(sizes) - 1) / 2) * width
        )
        panel.bar(
            x,
            row.speedup.mid,
            width,
            yerr=style.whiskers([row.speedup]),
            color=_shade(colour, sizes, row.world_size),
            edgecolor="black",
            linewidth=0.6,
            hatch=style.HATCH if row.emulation else None,
            error_kw={"elinewidth": 1, "capsize": 2},
        )
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xticks(range(len(batch_sizes)), [str(batch_size) for batch_size in batch_sizes])
    panel.grid(axis="y", linewidth=0.4)
    panel.tick_params(labelleft=True)
    panel.set_title(_panel_title(sheet, rows))


def _panel_title(sheet: Sheet, rows: list[Row]) -> str:
    """Name the series, with its metric: what is fast must also have learnt."""
    letters = TITLE_LETTERS if sheet.page.width_in is None else PAPER_LETTERS
    title = textwrap.fill(sheet.label(rows[0].series), letters)
    metric = main_metric(name for row in sheet.rows for name in row.final)
    known = _range(rows, metric)
    return f"{title}\n{metric} {known}" if known and sheet.learns() else title


def _range(rows: list[Row], metric: str) -> str:
    """Write the lowest and the highest value of a metric, or one if they look the same."""
    known = [value for row in rows if not math.isnan(value := row.final.get(metric, math.nan))]
    if not known:
        return ""
    title, factor = heading(metric)
    low, high = f"{factor * min(known):.3g}", f"{factor * max(known):.3g}"
    return (low if low == high else f"{low}–{high}") + title.removeprefix(metric)


def _shade(colour: str, sizes: list[int], size: int) -> tuple[float, float, float]:
    """Return the colour, lighter for fewer ranks."""
    strength = 0.15 + 0.5 * (sizes.index(size) + 1) / len(sizes)
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def _lines(axes: Axes, sheet: Sheet, rows: list[Row], value: Callable[[Row], Interval]) -> None:
    """Draw a line with intervals per series, shifted a little so that none hides another."""
    names, sizes = list(sheet.looks), style.unique(row.world_size for row in sheet.rows)
    for name in series_of(rows):
        look, points = sheet.looks[name], [row for row in rows if row.series == name]
        aside = min(0.16, 0.04 * sizes[-1]) * ((names.index(name) + 0.5) / len(names) - 0.5)
        x, intervals = [row.world_size + aside for row in points], [value(row) for row in points]
        y = [interval.mid for interval in intervals]
        axes.errorbar(
            x, y, style.whiskers(intervals), color=look.colour, linestyle=look.line, linewidth=1.2
        )
        for point_x, point_y, row in zip(x, y, points, strict=True):
            face = "white" if row.emulation else look.colour
            axes.plot(point_x, point_y, look.marker, color=look.colour, markerfacecolor=face, ms=5)
    axes.set_xticks(sizes)
    axes.grid(linewidth=0.4)


def _handles(sheet: Sheet, rows: list[Row]) -> list[Artist]:
    lines = [line_handle(sheet, name) for name in series_of(rows)]
    return [*lines, *emulated_handle(sheet, bars=False)]


def _ranks(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"
