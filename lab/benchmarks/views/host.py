"""Show what strategies add to the thread that trains, beside torch's DDP."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from lab.benchmarks.views.text import about, machine, ranged
from lab.draw import looks, style
from lab.measure.intervals import Interval


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each strategy."""
    rows = [
        [row["name"], ranged(row["added_s"], 1e6), ranged(row["over_ddp"])]
        for row in result["rows"]
    ]
    return [["", "added (us)", "x DDP"], *rows]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the figures."""
    return [
        f"processor time of the training thread in a step of {result['num_parameters']} "
        f"parameters on {result['num_ranks']} ranks, less that of backward alone "
        f"({1e6 * result['plain_s']['median']:.0f} us)",
        f"medians of {result['num_rounds']} rounds in turns; [95 % intervals] draw whole rounds",
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw a bar for each strategy, with its interval; a line marks DDP's time."""
    rows = result["rows"]
    added = [Interval.read(row["added_s"]).scaled(1e6) for row in rows]
    longest = max(len(row["name"]) for row in rows)
    drawn, axes = style.canvas(1, 1, 5.5 + 0.075 * longest, 0.4 * len(rows) + 1.6)
    panel = axes[0][0]
    for place, one in enumerate(added):
        panel.barh(place, one.mid, height=0.6, color=looks.GREY if place == 0 else looks.BLUE)
        if one.lo == one.lo:
            panel.plot([one.lo, one.hi], [place, place], color="black", linewidth=1)
        panel.annotate(
            f" {one.mid:,.0f}",
            (max(one.mid, one.hi if one.hi == one.hi else 0), place),
            va="center",
        )
    line = {"color": "black", "linewidth": 0.8, "linestyle": ":"}
    ddp = panel.axvline(added[0].mid, label="DDP's time", zorder=1, **line)
    panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlim(0, 1.15 * max(max(one.mid, one.hi) for one in added))
    panel.set_xlabel("processor time added to the training thread (µs a step)")
    title = f"What exchanges cost the host: {result['num_parameters']} parameters"
    sample = f"medians of {result['num_rounds']} rounds, 95 % intervals"
    return style.frame(drawn, title, [ddp], [f"{machine(result)} · {sample}", *about(result)])
