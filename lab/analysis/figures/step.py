"""Figure: the parts of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.analysis.figures.sheet import NothingToDraw, Sheet, emulated_handle, finish, repeats
from lab.analysis.speedup import CEILING, Row
from lab.draw import style
from lab.draw.looks import BLUE, GREEN, SKY, VERMILLION
from lab.measure.intervals import Interval
from lab.measure.spans import PHASES

PHASE_LOOKS: dict[str, str] = dict(
    zip(PHASES, (style.GREY, SKY, BLUE, VERMILLION, GREEN), strict=True)
)
CEILING_PART, EXPOSED_PART = "step of none (ceiling)", "exposed exchange"
WHOLE_PART = "whole step: no run of\nnone on its model"
PART_LOOKS = {
    CEILING_PART: BLUE,
    EXPOSED_PART: VERMILLION,
    WHOLE_PART: "#C8C8C8",
}


@dataclass(frozen=True)
class Bar:
    """The parts of one bar in seconds, by name, and the interval of its end where known."""

    row: Row
    parts: dict[str, float]
    end: Interval | None


def step_time(sheet: Sheet) -> Figure:
    """Draw a stacked bar per series and world size, one column per batch.

    Bars show phases if the study has breakdown runs; else, from its throughput runs, the step of
    `none` and the time that the strategy adds to it, with the error bars of this difference.

    Raises:
        NothingToDraw: the study has neither.
    """
    if any(row.phases_s for row in sheet.rows):
        bars = [_phase_bar(row) for row in sheet.rows if row.phases_s]
        title = f"Step time by phase (breakdown runs), {sheet.scaling} scaling"
        return _draw(sheet, bars, PHASE_LOOKS, title, _breakdowns(bars))
    bars = [_exposed_bar(row) for row in sheet.measured()]
    if not any(CEILING_PART in bar.parts for bar in bars):
        raise NothingToDraw("no breakdown run, and no run of none to compare with")
    title = (
        "Step time as the step of none (ceiling) plus the exposed exchange (throughput runs), "
        f"{sheet.scaling} scaling"
    )
    return _draw(sheet, bars, PART_LOOKS, title, repeats(bar.row for bar in bars))


def _phase_bar(row: Row) -> Bar:
    return Bar(row, dict(row.phases_s), None)


def _exposed_bar(row: Row) -> Bar:
    exposed = row.exposed_exchange_s
    if row.strategy == CEILING:
        return Bar(row, {CEILING_PART: row.step_s}, None)
    if math.isnan(exposed.mid):
        return Bar(row, {WHOLE_PART: row.step_s}, None)
    # A strategy may come out faster than the ceiling by noise: the bar then ends at its own step.
    shown = max(0.0, exposed.mid)
    ceiling = row.step_s - shown
    end = Interval(*(row.step_s - exposed.mid + e for e in (exposed.lo, exposed.mid, exposed.hi)))
    return Bar(row, {CEILING_PART: ceiling, EXPOSED_PART: shown}, end)


def _breakdowns(bars: list[Bar]) -> str:
    counts = style.unique(bar.row.num_breakdowns for bar in bars)
    return f"medians of n = {' to '.join(map(str, counts))} runs, no intervals"


def _draw(
    sheet: Sheet, bars: list[Bar], colours: dict[str, str], title: str, sample: str
) -> Figure:
    batch_sizes = style.unique(bar.row.fixed_batch_size for bar in bars)
    places = style.unique(
        (bar.row.world_size, list(sheet.looks).index(bar.row.series)) for bar in bars
    )
    height = 0.2 * len(places) + 1.8
    ticks = _tick_names(sheet, places)
    width = 2.6 * len(batch_sizes) + 0.07 * max(map(len, ticks)) + style.LEGEND_ROOM
    figure, axes = sheet.canvas(1, len(batch_sizes), width, height, sharex=True, sharey=True)
    for panel, batch_size in zip(axes[0], batch_sizes, strict=True):
        _stack(
            panel,
            sheet,
            [bar for bar in bars if bar.row.fixed_batch_size == batch_size],
            places,
            colours,
        )
        panel.set_title(f"{sheet.batch_name()} {batch_size}")
        panel.set_xlabel("step time (ms)")
    axes[0][0].set_yticks(_heights(places), ticks)
    axes[0][0].set_ylim(_heights(places)[-1] + 0.7, -0.7)
    used = {part for bar in bars for part in bar.parts}
    handles: list[Artist] = [
        Patch(facecolor=colour, edgecolor="black", label=_part_label(part))
        for part, colour in colours.items()
        if part in used
    ]
    handles += emulated_handle(sheet, bars=True)
    return finish(figure, sheet, title, handles, sample)


def _stack(
    panel: Axes,
    sheet: Sheet,
    bars: list[Bar],
    places: list[tuple[int, int]],
    colours: dict[str, str],
) -> None:
    heights, names = _heights(places), list(sheet.looks)
    for bar in bars:
        y = heights[places.index((bar.row.world_size, names.index(bar.row.series)))]
        left = 0.0
        for part in (p for p in colours if p in bar.parts):
            length = 1e3 * bar.parts[part]
            panel.barh(
                y,
                length,
                0.8,
                left,
                color=colours[part],
                edgecolor="black",
                linewidth=0.4,
                hatch=style.HATCH if bar.row.emulation else None,
            )
            left += length
        if bar.end is not None:
            error = style.whiskers([bar.end], 1e3)
            panel.errorbar(left, y, xerr=error, color="black", elinewidth=1, capsize=2)
    panel.grid(axis="x", linewidth=0.4)


def _heights(places: list[tuple[int, int]]) -> list[float]:
    """Return the bars' positions: one below the other, with a gap between world sizes."""
    sizes = style.unique(size for size, _ in places)
    return [row + 0.6 * sizes.index(size) for row, (size, _) in enumerate(places)]


def _tick_names(sheet: Sheet, places: list[tuple[int, int]]) -> list[str]:
    names = list(sheet.looks)
    return [f"{names[index]}  N={size}" for size, index in places]


def _part_label(part: str) -> str:
    return EXPOSED_PART if part == "exchange" else part
