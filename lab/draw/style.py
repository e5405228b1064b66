"""The style of all figures: axes, error bars, title, legend and footer."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure

from lab.measure.intervals import Interval

LEGEND_ROOM = 2.0  # inches to the right of the axes in every figure
SHADES = ("#c6dbef", "#6baed6", "#2171b5", "#08306b")
GREY, HATCH = "#767676", "////"
RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,  # TrueType, which journals ask for
    "svg.hashsalt": "lab",  # the same records give the same bytes
}


def unique(values: Iterable[Any]) -> list[Any]:
    """Return the distinct values in ascending order."""
    return sorted(set(values))


def whiskers(values: Sequence[Interval], scale: float = 1.0) -> list[list[float]]:
    """Return error bars for matplotlib, shape (2, len(values)); NaN draws none."""
    below = [scale * (v.mid - v.lo) for v in values]
    above = [scale * (v.hi - v.mid) for v in values]
    # Rounding can put the middle outside its interval by one bit, which matplotlib refuses.
    return [[e if math.isnan(e) else max(0.0, e) for e in side] for side in (below, above)]


def shades(count: int) -> list[str]:
    """Choose colours for an ordered series, such as numbers of ranks, from light to dark."""
    if count <= len(SHADES):
        return list(SHADES[:count])
    between = LinearSegmentedColormap.from_list("shades", SHADES)
    return [to_hex(between(index / (count - 1))) for index in range(count)]


def canvas(
    num_rows: int,
    num_columns: int,
    width: float,
    height: float,
    **share: Any,
) -> tuple[Figure, list[list[Axes]]]:
    """Make a figure with its axes, indexed [row][column].

    Args:
        width, height: inches.
        share: `sharex` and `sharey` of matplotlib's `subplots`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False, **share)
    return figure, [list(row) for row in axes]


def frame(figure: Figure, title: str, handles: list[Artist], footer: list[str]) -> Figure:
    """Put a title, a legend and a footer around the axes.

    Args:
        figure: with everything drawn; made wider for a legend of long names.
        title: wrapped so that it ends before the legend.
        handles: the legend's entries.
        footer: paragraphs; empty ones are left out.
    """
    footer = [text for text in footer if text]
    longest = max(len(line) for h in handles for line in str(h.get_label()).splitlines())
    legend = 0.7 + 0.065 * longest  # inches: the line of a legend entry, and letters of 8 pt
    width = figure.get_figwidth() + max(0.0, legend - LEGEND_ROOM)
    figure.set_figwidth(width)
    look = {"frameon": False, "fontsize": 8, "handlelength": 2.6}  # long enough to show dashes
    figure.legend(handles=handles, loc="outside right upper", **look)
    title = textwrap.fill(title, int((width - legend) * 11))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    wrapped = [textwrap.fill(text, int(width * 17)) for text in footer]
    figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=7, color="#444444")
    return figure
