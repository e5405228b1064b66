"""Draw findings as the figures of a paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter, NullLocator

from lab.claims.claims import KINDS, Check, Reproduction
from lab.claims.findings import Conditions, Reproduced
from lab.claims.mini_batches import GPUS, Network
from lab.claims.speedups import CellSpeedup, RateSpeedups, SpeedupMap
from lab.claims.verdicts import Verdict
from lab.draw import style
from lab.draw.looks import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILLION, looks_of

TICKS = (0.1, 1, 10, 100, 1000)  # Gb/s
COLUMNS = 3
WIDEST_BAR = 0.26  # share of the distance between groups, including the gap to the next bar
GROUP = 0.9  # share of that distance that all bars of a group may take
GAP = 0.02
COLOURS = dict(zip(KINDS, (VERMILLION, ORANGE, BLUE, style.GREY, GREEN), strict=True))
LIMITS = (0.2, 5.0)  # of the axis, in units of what a claim says
MARK = {"markersize": 4, "clip_on": False}
MACHINES = (  # machine, column, colour, what the legend says
    ("desktop", 0, ORANGE, "published: desktop, 1 thread"),
    ("desktop", 1, SKY, "published: desktop, 2 threads"),
    ("gpu", GPUS.index("GTX 1080"), BLUE, "published: GTX 1080"),
)
HERE = {1: ("o", "here, 1 thread"), 2: ("s", "here, 2 threads")}


def speedup_bars(reproduced: Reproduced, conditions: Conditions | None, notes: list[str]) -> Figure:
    """Draw the speedup of cells: a panel for each strategy, a group of bars for each batch size.

    Bars are measured (hatched: emulated) with the range of their repeats; if nothing was, they are
    predicted. A dash over a bar is its prediction, a diamond the paper's own figure.

    Args:
        conditions: conditions of the measurements; None without any.
    """
    grid = reproduced.grid
    figure, panels = _panels(len(grid.strategies))
    for panel, strategy in zip(panels, grid.strategies, strict=False):
        cells = [cell for cell in reproduced.cells if cell.at.strategy == strategy]
        _groups(panel, grid, cells, conditions)
        panel.axhline(1, color=BLACK, linewidth=0.8)
        panel.set_xticks(range(len(grid.batch_sizes)), [str(batch) for batch in grid.batch_sizes])
        panel.set_title("none (ceiling)" if strategy == "none" else strategy)
        panel.set_xlabel("global batch")
    panels[0].set_ylabel("speedup over 1 rank")
    shown = "measured, predicted and published" if conditions else "predicted (bars) and published"
    entries = _bar_entries(grid.world_sizes, conditions)
    return style.frame(figure, f"Speedup: {shown}", entries, notes)


def _groups(
    panel: Axes, grid: Reproduction, cells: Sequence[CellSpeedup], conditions: Conditions | None
) -> None:
    count = len(grid.world_sizes)
    distance = min(WIDEST_BAR, GROUP / count)
    colours = style.shades(count)
    for cell in cells:
        index = grid.world_sizes.index(cell.at.world_size)
        x = grid.batch_sizes.index(cell.at.batch_size) + (index - (count - 1) / 2) * distance
        _bar(panel, x, distance - GAP, colours[index], cell, conditions)
        for published in cell.published:
            panel.plot(x, published, "D", color=VERMILLION, markersize=5)


def _bar(
    panel: Axes,
    x: float,
    width: float,
    colour: str,
    cell: CellSpeedup,
    conditions: Conditions | None,
) -> None:
    if not conditions:
        pale = f"{colour}60"
        panel.bar(x, cell.predicted, width, facecolor=pale, edgecolor=colour, linewidth=1.2)
        return
    hatch = style.HATCH if conditions.emulations else None
    panel.bar(x, cell.measured, width, color=colour, edgecolor=style.GREY, hatch=hatch)
    repeats = cell.repeats
    panel.plot([x] * len(repeats), repeats, color=ORANGE, linewidth=2)
    ends = [x - width / 2, x + width / 2]
    panel.plot(ends, [cell.predicted] * 2, color=BLACK, linewidth=2)


def _bar_entries(world_sizes: Sequence[int], conditions: Conditions | None) -> list[Artist]:
    entries: list[Artist] = [
        Patch(facecolor=colour, label=f"{size} rank{'s' if size > 1 else ''}")
        for size, colour in zip(world_sizes, style.shades(len(world_sizes)), strict=True)
    ]
    if conditions:
        entries.append(Line2D([], [], color=BLACK, linewidth=2, label="predicted"))
        entries.append(Line2D([], [], color=ORANGE, linewidth=2, label="all repeats"))
        if conditions.emulations:
            entries.append(Patch(facecolor="white", hatch=style.HATCH, label="emulated"))
    diamond = Line2D([], [], color=VERMILLION, marker="D", linestyle="", label="published")
    return [*entries, diamond]


def regime_map(speedups: SpeedupMap, notes: list[str]) -> Figure:
    """Draw predicted speedup over ranks and batch, a panel for each strategy.

    In red areas, below the line of speedup 1, training is slower than on one rank.
    """
    figure, panels = _panels(len(speedups.values))
    ranks, batches = range(len(speedups.ranks)), range(len(speedups.batches))
    image = None
    for panel, (strategy, values) in zip(panels, speedups.values.items(), strict=False):
        logs = [[math.log2(value) for value in row] for row in values]
        shape = {"vmin": -8, "vmax": 8, "cmap": "RdBu", "shading": "nearest"}
        image = panel.pcolormesh(ranks, batches, logs, **shape)
        panel.contour(ranks, batches, logs, levels=[0.0], colors="black", linewidths=1.2)
        panel.set_xticks(ranks[::2], [str(size) for size in speedups.ranks[::2]])
        panel.set_yticks(batches[::2], [str(batch) for batch in speedups.batches[::2]])
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


def speedup_over_rate(speedups: RateSpeedups, notes: list[str]) -> Figure:
    """Draw predicted speedup over the rate of the links, a panel for each batch.

    The rate of the hardware's own links is marked.
    """
    figure, axes = style.canvas(1, len(speedups.values), 9.6, 3.4, sharey=True)
    looks = looks_of(name for by_name in speedups.values.values() for name in by_name)
    gigabits = [8e-9 * rate for rate in speedups.rates]
    for panel, (batch, values) in zip(axes[0], speedups.values.items(), strict=True):
        for name, look in looks.items():
            panel.plot(gigabits, values[name], color=look.colour, linestyle=look.line)
        panel.axvline(8e-9 * speedups.own_rate, color=style.GREY, linestyle=":", linewidth=1)
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
    title = f"Predicted speedup of {speedups.world_size} ranks over the rate of their links"
    return style.frame(figure, title, handles, notes)


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    rows = -(-count // COLUMNS)
    figure, axes = style.canvas(rows, min(count, COLUMNS), 9.6, 2.7 * rows + 0.6, sharey=True)
    flat = [panel for row in axes for panel in row]
    for empty in flat[count:]:
        empty.set_visible(False)
    return figure, flat


def verdicts(found: Sequence[Verdict], notes: list[str]) -> Figure:
    """Draw a line for each claim: the band that it allows, and the values that were found.

    Values are divided by the claim's figure or bound, so that all share an axis; those beyond the
    axis are drawn at its end.
    """
    ordered = [each for kind in KINDS for each in found if each.claim.kind == kind]
    known = [each for each in ordered if each.outcome != "unknown"]
    figure, axes = style.canvas(1, 1, 9.6, 0.32 * len(known) + 1.4)
    panel = axes[0][0]
    for place, verdict in enumerate(reversed(known)):
        _line(panel, place, verdict)
    panel.axvline(1, color=BLACK, linewidth=0.6)
    panel.set_xscale("log")
    panel.set_xlim(*LIMITS)
    panel.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_yticks(range(len(known)), [_label(each) for each in reversed(known)], fontsize=7)
    panel.set_ylim(-0.6, len(known) - 0.4)
    panel.set_xlabel("value / what the claim says")
    return style.frame(figure, "Claims: what was found, and what holds", _entries(known), notes)


def _line(panel: Axes, place: int, verdict: Verdict) -> None:
    unit, colour = _unit(verdict.claim.check), COLOURS[verdict.claim.kind]
    least, most = verdict.claim.check.allowed
    band = [_clip(least / unit), _clip(most / unit)]
    panel.barh(place, band[1] - band[0], 0.7, left=band[0], color=colour, alpha=0.25)
    if verdict.predicted is not None:
        face = "white" if verdict.evidence == "measured" else BLACK
        x = _clip(verdict.predicted / unit)
        panel.plot(x, place, "D", color=BLACK, markerfacecolor=face, **MARK)
        ends = verdict.predicted_ends or (verdict.predicted, verdict.predicted)
        panel.plot([_clip(end / unit) for end in ends], [place] * 2, color=style.GREY, linewidth=1)
    value = verdict.measured
    if not math.isnan(value.mid):
        panel.plot(_clip(value.mid / unit), place, "o", color=BLACK, **MARK)
    if not math.isnan(value.lo):
        panel.plot([_clip(value.lo / unit), _clip(value.hi / unit)], [place] * 2, color=BLACK)


def _unit(check: Check) -> float:
    """Return what the claim says: its figure, or its one bound; 1 where that is 0."""
    return next(x for x in (check.about, check.at_least, check.at_most) if x is not None) or 1.0


def _clip(value: float) -> float:
    return min(max(value, LIMITS[0]), LIMITS[1])


def _label(verdict: Verdict) -> str:
    says = verdict.claim.says
    return f"{says if len(says) <= 60 else says[:59] + '…'}: {verdict.outcome}"


def _entries(found: Sequence[Verdict]) -> list[Artist]:
    kinds = [kind for kind in KINDS if any(each.claim.kind == kind for each in found)]
    entries: list[Artist] = [
        Patch(color=COLOURS[k], alpha=0.25, label=f"{k}: allowed") for k in kinds
    ]
    mark = {"color": BLACK, "linestyle": "", "markersize": 4}
    predicted = [each for each in found if each.predicted is not None]
    if predicted:
        beside = any(each.evidence == "measured" for each in predicted)
        face = "white" if beside else BLACK
        label = "predicted or counted"
        entries.append(Line2D([], [], marker="D", markerfacecolor=face, label=label, **mark))
    if any(each.predicted_ends for each in predicted):
        entries.append(Line2D([], [], color=style.GREY, linewidth=1, label="as assumptions allow"))
    if any(each.evidence == "measured" for each in found):
        entries.append(Line2D([], [], marker="o", label="measured", **mark))
        entries.append(Line2D([], [], color=BLACK, label="95 % interval"))
    return entries


def mini_batches(found: Sequence[Network], note: str) -> Figure:
    """Draw a row for each network: a mark for each tool, and those of this machine."""
    figure, axes = style.canvas(1, 1, 9.0, 0.5 * len(found) + 1.4)
    panel = axes[0][0]
    for row, one in enumerate(found):
        for machine, place, colour, _ in MACHINES:
            seconds = list(one.published(machine, place).values())
            panel.plot(seconds, [row] * len(seconds), "|", color=colour, ms=14, mew=2)
        for threads, (marker, _) in HERE.items():
            if value := one.here.get(threads):
                error = style.whiskers([value])
                panel.errorbar(value.mid, row, xerr=error, fmt=marker, color=BLACK, ms=5)
    panel.set_xscale("log")
    panel.set_yticks(range(len(found)), [f"{one.name}, batch {one.batch_size}" for one in found])
    panel.set_ylim(len(found) - 0.5, -0.5)
    panel.set_xlabel("seconds per mini-batch; published: a mark for each tool")
    panel.grid(axis="x", linewidth=0.4)
    entries: list[Artist] = [
        Line2D([], [], color=colour, marker="|", ms=10, mew=2, ls="", label=text)
        for *_, colour, text in MACHINES
    ]
    entries += [
        Line2D([], [], color=BLACK, marker=marker, ms=5, ls="", label=text)
        for marker, text in HERE.values()
    ]
    return style.frame(figure, "Seconds per mini-batch of seven networks", entries, [note])
