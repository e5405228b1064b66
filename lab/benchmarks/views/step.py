"""Show step times: ratios to the last, and exposed communication if `none` was measured."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.benchmarks.views.text import about, machine, ranged
from lab.draw import style
from lab.draw.looks import Look, looks_of
from lab.measure.intervals import Interval


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line per setting; exposed communication only if it is known."""
    last = result["rows"][-1]["name"]
    header = ["", "step (ms)", "mad", f"ratio to {last}", "exposed exchange (ms)", "of ddp's"]
    lines = [header, *(_line(row) for row in result["rows"])]
    known = any(row["exposed_exchange_s"] for row in result["rows"])
    return lines if known else [line[:4] for line in lines]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    every = result["steps_per_round"]
    round_ = "a step of each in every round" if every == 1 else f"rounds of {every} steps of each"
    return [
        f"medians of {result['num_pairs']} rounds on {result['world_size']} ranks "
        f"({result['backend']}), {round_}; a step lasts as long as on its slowest rank",
        "[95 % intervals] draw whole rounds; exposed exchange: step - step of none, same run",
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw panels for step time and ratios, and two for exposed communication if it is known."""
    rows = result["rows"]
    last = rows[-1]["name"]
    steps = [_around(row["step_s"]) for row in rows]
    columns = {
        "step time (ms), median and mad": [step.scaled(1e3) for step in steps],
        f"step time / that of {last}": [Interval.read(row["ratio"]) for row in rows],
        "exposed exchange (ms)": [
            Interval.read(row["exposed_exchange_s"]).scaled(1e3) for row in rows
        ],
        "exposed exchange / ddp's": [Interval.read(row["exposed_to_ddp"]) for row in rows],
    }
    shown = {
        name: values for name, values in columns.items() if any(v.mid == v.mid for v in values)
    }
    looks = looks_of(row["name"] for row in rows)
    names = 0.075 * max(len(row["name"]) for row in rows)
    drawn, axes = style.canvas(
        1,
        len(shown),
        2.8 * len(shown) + names + style.LEGEND_ROOM,
        0.35 * len(rows) + 1.7,
        sharey=True,
    )
    for panel, (name, values) in zip(axes[0], shown.items(), strict=True):
        _dots(panel, values, [looks[row["name"]] for row in rows], result["emulation"] != "none")
        panel.set_xlabel(name)
        if "/" in name:
            panel.axvline(1, color="black", linewidth=0.8, zorder=1)
    axes[0][0].set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes[0][0].set_ylim(len(rows) - 0.5, -0.5)
    handles: list[Artist] = [
        Line2D([], [], color=style.GREY, marker="o", label="95 % interval;\nof the step time: mad")
    ]
    title = f"Step times on {result['world_size']} ranks, taken in turns"
    sample = f"medians of {result['num_pairs']} rounds"
    return style.frame(drawn, title, handles, [f"{machine(result)} · {sample}", *about(result)])


def _around(step_s: dict[str, float]) -> Interval:
    median, mad = step_s["median"], step_s["mad"]
    return Interval(median - mad, median, median + mad)


def _dots(panel: Axes, values: list[Interval], looks: list[Look], hollow: bool) -> None:
    for place, (value, look) in enumerate(zip(values, looks, strict=True)):
        face = "white" if hollow else look.colour
        panel.errorbar(
            value.mid,
            place,
            xerr=style.whiskers([value]),
            color=look.colour,
            marker=look.marker,
            markerfacecolor=face,
            capsize=3,
        )
    panel.grid(axis="x", linewidth=0.4)


def _line(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{1e3 * row['step_s']['median']:.2f}",
        f"{1e3 * row['step_s']['mad']:.2f}",
        "1" if row["ratio"] is None else ranged(row["ratio"]),
        ranged(row["exposed_exchange_s"], 1e3),
        ranged(row["exposed_to_ddp"]),
    ]
