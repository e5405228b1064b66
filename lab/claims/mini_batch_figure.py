"""Draw seconds per mini-batch as published and as measured here."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.claims.mini_batches import GPUS, Network
from lab.draw import style
from lab.draw.looks import BLACK, BLUE, ORANGE, SKY

COLUMNS = (  # machine, column, colour, what the legend says
    ("desktop", 0, ORANGE, "published: desktop, 1 thread"),
    ("desktop", 1, SKY, "published: desktop, 2 threads"),
    ("gpu", GPUS.index("GTX 1080"), BLUE, "published: GTX 1080"),
)
HERE = {1: ("o", "here, 1 thread"), 2: ("s", "here, 2 threads")}


def mini_batches(found: Sequence[Network], note: str) -> Figure:
    """Draw a row for each network: a mark for each tool, and those of this machine."""
    figure, axes = style.canvas(1, 1, 9.0, 0.5 * len(found) + 1.4)
    panel = axes[0][0]
    for row, one in enumerate(found):
        for machine, place, colour, _ in COLUMNS:
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
        for *_, colour, text in COLUMNS
    ]
    entries += [
        Line2D([], [], color=BLACK, marker=marker, ms=5, ls="", label=text)
        for marker, text in HERE.values()
    ]
    return style.frame(figure, "Seconds per mini-batch of seven networks", entries, [note])
