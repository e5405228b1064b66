"""How every figure looks: one colour, marker and line per series, a title, a legend, a footer."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.analysis.records import Study, order
from lab.analysis.speedup import CEILING, Row
from lab.measure.intervals import ENOUGH_REPEATS, Interval

# Okabe and Ito, "Color Universal Design", 2008; without its yellow, which is lost on white.
BLACK, BLUE, GREEN, ORANGE = "#000000", "#0072B2", "#009E73", "#E69F00"
VERMILLION, PURPLE, SKY, BROWN = "#D55E00", "#CC79A7", "#56B4E9", "#8C6D31"
COLOURS = (BLUE, GREEN, ORANGE, VERMILLION, PURPLE, SKY, BLACK)
LEGEND_ROOM = 2.0  # inches beside the axes that every figure is made with
GREY, HATCH = "#767676", "////"
RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "lab",  # the same records give the same bytes
}


LineStyle = Literal["-", "--", ":", "-."]
LINES: tuple[LineStyle, ...] = ("-", "--", ":", "-.")


class NothingToDraw(Exception):
    """A figure's data are absent; the text says which."""


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    colour: str
    line: LineStyle
    marker: str


KNOWN = {
    "none": Look(BLACK, "-", "o"),
    "allreduce": Look(BLUE, "-", "s"),
    "tree": Look(GREEN, "-", "^"),
    "tree_pipelined": Look(GREEN, ":", "^"),
    "tree_double": Look(GREEN, "-.", "v"),
    "ring": Look(SKY, "-", "D"),
    "star": Look(SKY, "--", "v"),
    "overlap": Look(ORANGE, "-", "P"),
    "layerwise": Look(ORANGE, "--", "<"),
    "bf16": Look(BLUE, "--", "X"),
    "fp16": Look(BLUE, ":", "x"),
    "int8": Look(BLUE, "-.", "8"),
    "onebit": Look(VERMILLION, "-", "*"),
    "signsgd_ef": Look(VERMILLION, "--", "+"),
    "topk": Look(BROWN, "-", "p"),
    "randomk": Look(BROWN, "--", "h"),
    "powersgd": Look(PURPLE, "-.", "D"),
    "auto": Look(BLACK, "--", "*"),
    "fc1x1": Look(PURPLE, "-", "p"),
    "fc1x1_onebit": Look(PURPLE, "--", "h"),
    "local_sgd": Look(SKY, ":", ">"),
    "diloco": Look(VERMILLION, ":", "H"),
    "ddp": Look(GREEN, "--", "d"),
    "caffe": Look(BROWN, ":", "^"),
    "torch7": Look(SKY, "-.", "v"),
    "cntk": Look(VERMILLION, "-.", "*"),
    "tensorflow": Look(ORANGE, ":", "<"),
}


@dataclass(frozen=True)
class Sheet:
    """What one set of figures is drawn from: the rows of one scaling of a study."""

    study: Study
    scaling: str
    rows: tuple[Row, ...]
    looks: dict[str, Look]

    def measured(self) -> list[Row]:
        """Rows with throughput runs.

        Raises:
            NothingToDraw: there are none.
        """
        rows = [row for row in self.rows if row.num_repeats]
        if not rows:
            raise NothingToDraw("no finished throughput run")
        return rows

    def batch_name(self) -> str:
        """What a batch means in this scaling."""
        return "global batch" if self.scaling == "strong" else "per-rank batch"

    def label(self, series: str) -> str:
        """The series as a legend names it, with what sets it apart from the others."""
        row = next(row for row in self.rows if row.series == series)
        if row.strategy == CEILING:
            return f"{series} (ceiling)"
        return f"{series} (another model)" if row.transform else series

    def emulated(self) -> list[str]:
        """How the emulated ones among the rows are emulated."""
        return sorted({row.emulation for row in self.rows} - {""})


def looks(series: Iterable[str]) -> dict[str, Look]:
    """A look for each series of a study, no two alike while there are enough.

    A known strategy keeps its own; where a setting splits it into several series, the first one
    does, and the others take looks that the study has left over.
    """
    ordered = sorted(set(series), key=order)
    given: dict[str, Look] = {}
    for name in ordered:
        own = KNOWN.get(name.split(" ")[0])
        if own and own not in given.values():
            given[name] = own
    taken = {(look.colour, look.line) for look in given.values()}
    pairs: list[tuple[str, LineStyle]] = [(c, line) for line in LINES for c in COLOURS]
    free = [pair for pair in pairs if pair not in taken] or pairs
    spare = (
        Look(colour, line, m)
        for (colour, line), m in zip(itertools.cycle(free), itertools.cycle("osD^vP"), strict=False)
    )
    return {name: given[name] if name in given else next(spare) for name in ordered}


def unique(values: Iterable[Any]) -> list[Any]:
    """Distinct values in ascending order."""
    return sorted(set(values))


def series_of(rows: Iterable[Row]) -> list[str]:
    """Distinct series in reading order."""
    return sorted({row.series for row in rows}, key=order)


def whiskers(values: Sequence[Interval], scale: float = 1.0) -> list[list[float]]:
    """Error bars for matplotlib, shape (2, len(values)); NaN draws none."""
    below = [scale * (v.mid - v.lo) for v in values]
    above = [scale * (v.hi - v.mid) for v in values]
    # Rounding can put the middle outside its interval by one bit, which matplotlib refuses.
    return [[e if math.isnan(e) else max(0.0, e) for e in side] for side in (below, above)]


def canvas(
    num_rows: int, num_columns: int, width: float, height: float, **share: Any
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `width` x `height` inches with its axes, indexed [row][column]."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False, **share)
    return figure, [list(row) for row in axes]


def line_handle(sheet: Sheet, series: str) -> Line2D:
    """The legend entry of a series drawn as a line."""
    look, text = sheet.looks[series], sheet.label(series)
    return Line2D([], [], color=look.colour, ls=look.line, marker=look.marker, label=text)


def emulated_handle(sheet: Sheet, bars: bool) -> list[Artist]:
    """The legend entry of emulated points: hatched bars, hollow markers; nothing without any."""
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
        sheet: what it was drawn from.
        title: wrapped so that it ends before the legend.
        handles: the legend's entries.
        sample: how many runs stand behind a point, and what the error bars are.
        notes: what else a reader must know.
    """
    how = "; ".join(sheet.emulated())
    footer = [f"{_context(sheet)} · {sample}", notes, f"emulated: {how}" if how else ""]
    return frame(figure, title, handles, footer)


def frame(figure: Figure, title: str, handles: list[Artist], footer: list[str]) -> Figure:
    """What is around the axes of every figure: see `finish`. `footer`: paragraphs, maybe empty."""
    longest = max(len(line) for h in handles for line in str(h.get_label()).splitlines())
    legend = 0.7 + 0.065 * longest  # inches: a line, and letters of 8 pt
    width = figure.get_figwidth() + max(0.0, legend - LEGEND_ROOM)
    figure.set_figwidth(width)
    title = textwrap.fill(title, int((width - legend) * 11))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    wrapped = [textwrap.fill(text, int(width * 17)) for text in footer if text]
    figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=7, color="#444444")
    return figure


def repeats(rows: Iterable[Row]) -> str:
    """How many repeats stand behind the throughput of `rows`, and what their intervals are."""
    counts = unique(row.num_repeats for row in rows)
    text = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    if counts[-1] == 1:
        return f"{text} repeat: no intervals"
    small = f" (nominal: n<{ENOUGH_REPEATS})" if counts[0] < ENOUGH_REPEATS else ""
    return f"{text} repeats, 95 % bootstrap intervals{small}"


def _context(sheet: Sheet) -> str:
    cells = sheet.study.cells
    shared = [
        f"{key} {', '.join(unique(c.settings[key] for c in cells if key in c.settings))}"
        for key in ("model", "data", "device", "machine")
        if any(key in cell.settings for cell in cells)
    ]
    return " · ".join([f"study {sheet.study.name}", *shared])
