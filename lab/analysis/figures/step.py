"""Figure: the parts of a step."""

from __future__ import annotations

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.analysis.figures.sheet import emulated_handle, finish
from lab.analysis.sheet import Sheet
from lab.analysis.step_parts import EXPOSED_PART, Bar, stacked_bars
from lab.draw import style


def step_time(sheet: Sheet) -> Figure:
    """Draw a stacked bar per series and world size, one column per batch.

    Bars show phases if the study has breakdown runs; else, from its throughput runs, the step of
    `none` and the time that the strategy adds to it, with the error bars of this difference.

    Raises:
        NothingToDraw: the study has neither.
    """
    stacked = stacked_bars(sheet)
    return _draw(sheet, [*stacked.bars], stacked.colours, stacked.title, stacked.sample)


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
    figure, axes = style.canvas(
        1, len(batch_sizes), width, height, sheet.page, sharex=True, sharey=True
    )
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
