"""Figures in a column of a paper: panels that do not fit side by side, and the legend, go below."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lab.draw.page import LETTER_IN, Page

HEIGHT = 0.5  # of the height on a screen, where letters are larger
TITLE_IN, LEGEND_IN, FOOTER_IN = 0.15, 0.14, 0.1  # heights of a line of 8, 7 and 5.5 pt
MARGIN_IN = 0.02
HANDLE_IN = 0.42  # width of a legend entry without its letters
EVERYWHERE = (True, "all")


def paper_canvas(
    num_rows: int,
    num_columns: int,
    width: float,
    height: float,
    sharex: bool | str = False,
    sharey: bool | str = False,
) -> tuple[Figure, list[list[Axes]]]:
    """Make a figure of `width` inches. Columns that do not fit continue below, in a block.

    Args:
        height: inches that the rows would have on a screen.
        sharex, sharey: as of matplotlib's `subplots`: False, True, or "col" and "row".

    Returns:
        The figure, and its axes as if nothing had moved: [row][column].
    """
    fitting = Page(width).num_columns(num_columns)
    blocks = math.ceil(num_columns / fitting)
    figure = Figure(figsize=(width, HEIGHT * height * blocks), layout="constrained")
    made = figure.subplots(num_rows * blocks, fitting, squeeze=False)
    axes = [
        [
            made[column // fitting * num_rows + row][column % fitting]
            for column in range(num_columns)
        ]
        for row in range(num_rows)
    ]
    for unused in made[-num_rows:, fitting - (blocks * fitting - num_columns) :].flat:
        unused.remove()
    for row, line in enumerate(axes):
        for column, panel in enumerate(line):
            if sharex:
                first = axes[0][0 if sharex in EVERYWHERE else column]
                _share(panel, first, "x", hides=row < num_rows - 1)
            if sharey:
                first = axes[0 if sharey in EVERYWHERE else row][0]
                _share(panel, first, "y", hides=column % fitting > 0)
    return figure, axes


def _share(panel: Axes, first: Axes, axis: Literal["x", "y"], hides: bool) -> None:
    if panel is not first:
        (panel.sharex if axis == "x" else panel.sharey)(first)
    if hides:
        panel.tick_params(axis=axis, labelbottom=False, labelleft=False)


def on_paper(
    figure: Figure, title: str, handles: list[Artist], footer: list[str], page: Page
) -> Figure:
    """Make room above and below the axes, and put title, legend and footer there.

    The width stays. Heights are counted in lines, because constrained layout would let a legend
    and a footer below the axes overlap.
    """
    _name_rows(figure)
    width, height = figure.get_size_inches()
    title = textwrap.fill(title, int(width / (1.15 * LETTER_IN))) if page.title else ""
    wrapped = [textwrap.fill(text, int(width / (0.82 * LETTER_IN))) for text in footer]
    notes = "\n".join(wrapped) if page.title else ""
    columns = _in_columns([str(handle.get_label()) for handle in handles], width)
    lines = max(sum(map(_num_lines, column)) for column in columns)
    above = TITLE_IN * _num_lines(title) + MARGIN_IN
    below = FOOTER_IN * _num_lines(notes) + MARGIN_IN
    legend = LEGEND_IN * (lines + 0.7)
    total = above + height + legend + below
    figure.set_figheight(total)
    layout = figure.get_layout_engine()
    assert isinstance(layout, ConstrainedLayoutEngine)  # of paper_canvas
    layout.set(rect=(0, (legend + below) / total, 1, height / total))
    figure.text(0.01, 1 - MARGIN_IN / total, title, va="top", fontsize=8)
    figure.text(0.01, MARGIN_IN / total, notes, va="bottom", fontsize=5.5, color="#444444")
    figure.legend(
        handles=handles,
        ncols=len(columns),
        loc="lower center",
        bbox_to_anchor=(0.5, below / total),
        frameon=False,
        fontsize=7,
        handlelength=2.4,
        handletextpad=0.5,
        columnspacing=1.0,
        borderaxespad=0.2,
    )
    return figure


def _name_rows(figure: Figure) -> None:
    """Give the first panel of a row the label of the panels that it shares its y axis with."""
    for panel in figure.axes:
        place = panel.get_subplotspec()
        if place and place.is_first_col() and not panel.get_ylabel():
            siblings = panel.get_shared_y_axes().get_siblings(panel)
            names = {str(sibling.get_ylabel()) for sibling in siblings} - {""}  # type: ignore[attr-defined]
            panel.set_ylabel("".join(names))


def _in_columns(labels: Sequence[str], width: float) -> list[list[str]]:
    """Divide a legend's labels among as many columns as fit, as matplotlib does."""
    divided = [[*labels]]
    for count in range(2, len(labels) + 1):
        columns = [list(map(str, column)) for column in np.array_split(list(labels), count)]
        longest = [max(len(line) for text in c for line in text.splitlines()) for c in columns]
        if sum(HANDLE_IN + LETTER_IN * letters for letters in longest) > width:
            break
        divided = columns
    return divided


def _num_lines(text: str) -> int:
    return len(text.splitlines())
