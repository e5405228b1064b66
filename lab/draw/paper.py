"""The frame of a figure in a column of a paper: its legend lies below the axes."""

from __future__ import annotations

import math
import textwrap

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from lab.draw.page import LETTER_IN, Page

TITLE_IN, LEGEND_IN, FOOTER_IN = 0.15, 0.14, 0.1  # heights of a line of 8, 7 and 5.5 pt
HANDLE_IN = 0.36  # a legend entry without its letters


def on_paper(
    figure: Figure, title: str, handles: list[Artist], footer: list[str], page: Page
) -> Figure:
    """Make room above and below the axes, and put title, legend and footer there.

    The width stays. Heights are counted in lines, because constrained layout would let a legend
    and a footer below the axes overlap.
    """
    width, height = figure.get_size_inches()
    title = textwrap.fill(title, int(width / (1.15 * LETTER_IN))) if page.title else ""
    wrapped = [textwrap.fill(text, int(width / (0.75 * LETTER_IN))) for text in footer]
    notes = "\n".join(wrapped) if page.title else ""
    labels = [str(handle.get_label()) for handle in handles]
    columns = _columns(labels, width)
    lines = math.ceil(len(labels) / columns) * max(label.count("\n") + 1 for label in labels)
    above = TITLE_IN * _num_lines(title)
    below = FOOTER_IN * _num_lines(notes)
    legend = LEGEND_IN * (lines + 1)
    total = above + height + legend + below
    figure.set_figheight(total)
    layout = figure.get_layout_engine()
    assert layout is not None  # canvas gave it one
    layout.set(rect=(0, (legend + below) / total, 1, height / total))
    figure.text(0.01, 1, title, va="top", fontsize=8)
    figure.text(0.01, 0, notes, va="bottom", fontsize=5.5, color="#444444")
    figure.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, below / total),
        ncols=columns,
        frameon=False,
        fontsize=7,
        **{"handlelength": 1.8, "handletextpad": 0.5, "columnspacing": 1.0, "borderaxespad": 0.2},
    )
    return figure


def _columns(labels: list[str], width: float) -> int:
    longest = max(len(line) for label in labels for line in label.splitlines())
    fitting = int(width / (HANDLE_IN + LETTER_IN * longest))
    return max(1, min(len(labels), fitting))


def _num_lines(text: str) -> int:
    return len(text.splitlines())
