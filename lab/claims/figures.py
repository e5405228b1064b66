"""A paper's own figures, with what was measured and predicted here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from lab.claims.claims import Paper, Reproduction
from lab.claims.metrics import Facts, MeasuredFacts, Missing, Point, speedup
from lab.draw import style
from lab.draw.looks import BLACK, ORANGE, VERMILLION, looks_of

SHADES = ("#c6dbef", "#6baed6", "#2171b5", "#08306b")  # one for each number of ranks
MAP_RANKS = tuple(2**power for power in range(1, 9))
RATES = tuple(10 ** (power / 10) for power in range(70, 116))  # bytes per second
TICKS = (0.1, 1, 10, 100, 1000)  # Gb/s
MAP_BATCHES = tuple(2**power for power in range(6, 16))
COLUMNS = 3


@matplotlib.rc_context(style.RC)
def speedup_bars(
    paper: Paper,
    grid: Reproduction,
    predicted: Facts,
    measured: MeasuredFacts | None,
    notes: list[str],
) -> Figure:
    """Slide 26's grouped bars: a panel for each strategy, a group for each batch size.

    Bars are measured (hatched: emulated) with the range of their repeats, or, where nothing is,
    predicted; a dash over a bar is its prediction, a diamond what the paper published of it.
    """
    figure, panels = _panels(len(grid.strategies))
    for panel, strategy in zip(panels, grid.strategies, strict=False):
        for group, batch in enumerate(grid.batch_sizes):
            for index, size in enumerate(grid.world_sizes):
                at = Point(strategy, size, batch)
                x = group + (index - (len(grid.world_sizes) - 1) / 2) * 0.26
                _bar(panel, x, SHADES[index], at, predicted, measured)
                for claim in paper.claims:
                    if (claim.quantity, claim.at) == ("speedup", at) and claim.published:
                        panel.plot(x, claim.published, "D", color=VERMILLION, markersize=5)
        panel.axhline(1, color=BLACK, linewidth=0.8)
        panel.set_xticks(range(len(grid.batch_sizes)), [str(batch) for batch in grid.batch_sizes])
        panel.set_title(strategy)
        panel.set_xlabel("global batch")
    panels[0].set_ylabel("speedup over 1 rank")
    entries: list[Artist] = [
        Patch(facecolor=SHADES[index], label=f"{size} rank{'s' if size > 1 else ''}")
        for index, size in enumerate(grid.world_sizes)
    ]
    if measured:
        entries.append(Line2D([], [], color=BLACK, linewidth=2, label="predicted"))
        entries.append(Line2D([], [], color=ORANGE, linewidth=2, label="all repeats"))
        if measured.emulations():
            entries.append(Patch(facecolor="white", hatch=style.HATCH, label="emulated"))
    entries.append(Line2D([], [], color=VERMILLION, marker="D", linestyle="", label="published"))
    what = "measured, predicted and published" if measured else "predicted (bars) and published"
    return style.frame(figure, f"Speedup: {what}", entries, notes)


def _bar(
    panel: Axes, x: float, colour: str, at: Point, predicted: Facts, measured: MeasuredFacts | None
) -> None:
    guess = _speedup(predicted, at)
    if not measured:
        panel.bar(x, guess, 0.24, facecolor=f"{colour}60", edgecolor=colour, linewidth=1.2)
        return
    hatch = style.HATCH if measured.emulations() else None
    panel.bar(x, _speedup(measured, at), 0.24, color=colour, edgecolor=style.GREY, hatch=hatch)
    each = [value for one in measured.repeats() if math.isfinite(value := _speedup(one, at))]
    panel.plot([x] * len(each), each, color=ORANGE, linewidth=2)
    panel.plot([x - 0.12, x + 0.12], [guess, guess], color=BLACK, linewidth=2)


def _speedup(facts: Facts, at: Point) -> float:
    """NaN, which is not drawn, where these facts do not tell."""
    try:
        return speedup(facts, at)
    except Missing:
        return math.nan


@matplotlib.rc_context(style.RC)
def regime_map(grid: Reproduction, predicted: Facts, notes: list[str]) -> Figure:
    """Predicted speedup over ranks and batch, a panel for each strategy, with speedup 1 drawn.

    Below that line, where panels are red, more ranks make training slower than one.
    """
    figure, panels = _panels(len(grid.strategies))
    image = None
    for panel, strategy in zip(panels, grid.strategies, strict=False):
        values = [
            [math.log2(_speedup(predicted, Point(strategy, size, batch))) for size in MAP_RANKS]
            for batch in MAP_BATCHES
        ]
        shape = {"vmin": -8, "vmax": 8, "cmap": "RdBu", "shading": "nearest"}
        ranks, batches = range(len(MAP_RANKS)), range(len(MAP_BATCHES))
        image = panel.pcolormesh(ranks, batches, values, **shape)
        panel.contour(ranks, batches, values, levels=[0.0], colors="black", linewidths=1.2)
        panel.set_xticks(ranks[::2], [str(size) for size in MAP_RANKS[::2]])
        panel.set_yticks(batches[::2], [str(batch) for batch in MAP_BATCHES[::2]])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_title(strategy)
        panel.set_xlabel("ranks")
    panels[0].set_ylabel("global batch")
    if image is not None:
        bar = figure.colorbar(image, ax=panels, shrink=0.8, ticks=range(-8, 9, 2))
        bar.ax.set_yticklabels([str(Fraction(2) ** power) for power in range(-8, 9, 2)])
        bar.set_label("speedup over 1 rank (predicted)")
    entry = Line2D([], [], color=BLACK, linewidth=1.2, label="speedup = 1")
    return style.frame(figure, "Where more ranks pay", [entry], notes)


@matplotlib.rc_context(style.RC)
def speedup_over_rate(
    grid: Reproduction, at_rate: Callable[[float], Facts], own_rate: float, notes: list[str]
) -> Figure:
    """Predicted speedup of most ranks over the rate of their links, a panel for each batch.

    Args:
        at_rate: facts where links carry so many bytes per second.
        own_rate: of the hardware that `notes` name, which is marked.
    """
    figure, axes = style.canvas(1, len(grid.batch_sizes), 9.6, 3.4, sharey=True)
    facts = [at_rate(rate) for rate in RATES]
    looks = looks_of(grid.strategies)
    for panel, batch in zip(axes[0], grid.batch_sizes, strict=True):
        for name, look in looks.items():
            at = Point(name, max(grid.world_sizes), batch)
            values = [_speedup(one, at) for one in facts]
            x = [8e-9 * rate for rate in RATES]
            panel.plot(x, values, color=look.colour, linestyle=look.line)
        panel.axvline(8e-9 * own_rate, color=style.GREY, linestyle=":", linewidth=1)
        panel.axhline(1, color=BLACK, linewidth=0.8)
        panel.set_xscale("log")
        panel.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_title(f"global batch {batch}")
        panel.set_xlabel("link, Gb/s")
    axes[0][0].set_ylabel("speedup over 1 rank")
    handles: list[Artist] = [
        Line2D([], [], color=look.colour, linestyle=look.line, label=name)
        for name, look in looks.items()
    ]
    handles.append(Line2D([], [], color=style.GREY, linestyle=":", label="the links it has"))
    title = f"Predicted speedup of {max(grid.world_sizes)} ranks over the rate of their links"
    return style.frame(figure, title, handles, notes)


@matplotlib.rc_context(style.RC)
def save(figure: Figure, folder: Path, name: str) -> str:
    """Write `folder`/`name`.png; how a page beside `folder` shows it, in Markdown."""
    figure.savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight")
    return f"![{name}]({folder.name}/{name}.png)"


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    rows = -(-count // COLUMNS)
    figure, axes = style.canvas(rows, min(count, COLUMNS), 9.6, 2.7 * rows + 0.6, sharey=True)
    flat = [panel for row in axes for panel in row]
    for empty in flat[count:]:
        empty.set_visible(False)
    return figure, flat
