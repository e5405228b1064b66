"""Show instructions, loads, stores and cache hits of layers."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.benchmarks.views.text import about, machine
from lab.draw import style
from lab.draw.looks import BLUE, GREEN, ORANGE, SKY

M = 1e-6
HEADER = [
    *("", "layer", "", "pass", "instructions (M)", "loads (M)", "stores (M)", "loads, stores %"),
    *("L1 load hits %", "L2 load hits %", "L1 store hits %", "L2 store hits %"),
]
HITS = (("l1", BLUE, "L1"), ("l2", SKY, "L2, of L1's misses"))


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each pass of each layer."""
    return [HEADER, *(_line(row) for row in result["rows"])]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns, and say what counting costs."""
    return [
        f"simulated caches of data (bytes, ways, line): L1 {result['l1']}, L2 {result['l2']}; hits "
        "of L2 are of what L1 misses",
        f"caches are empty before each pass; oneDNN and MKL use {result['isa'].upper()}, on one "
        "thread",
        f"all took {result['seconds']:.0f} s, and a pass {result['slowdown']:.0f} times as long as "
        "without callgrind",
    ]


def hits(row: dict[str, Any], level: str, kind: str) -> float | None:
    """Return a level's share of hits; None: it was not asked.

    Args: level: "l1" or "l2". kind: "load" or "store".
    """
    misses = row[f"{level}_{kind}_misses"]
    asked = row[f"{kind}s"] if level == "l1" else row[f"l1_{kind}_misses"]
    return 1 - misses / asked if asked else None


def figure(result: dict[str, Any]) -> Figure:
    """Draw instructions, and hits of loads, of each layer's passes in the last variant."""
    last = result["rows"][-1]["name"]
    rows = [row for row in result["rows"] if row["name"] == last]
    drawn, axes = style.canvas(1, 2, 9.5, 0.17 * len(rows) + 1.8, sharey=True)
    counted, found = axes[0]
    for place, row in enumerate(rows):
        rest = row["instructions"] - row["loads"] - row["stores"]
        begin = 0.0
        for value, colour in ((row["loads"], BLUE), (row["stores"], ORANGE), (rest, GREEN)):
            counted.barh(place, M * value, 0.8, left=begin, color=colour, ec="white", lw=0.3)
            begin += M * value
        for level, colour, _ in HITS:
            share = hits(row, level, "load")
            if share is not None:
                marker = "o" if level == "l1" else "s"
                found.plot(100 * share, place, color=colour, marker=marker, ms=4, ls="")
    names = [f"{row['layer']} {row['pass']}" for row in rows]
    counted.set_yticks(range(len(rows)), names, fontsize=6)
    counted.set_ylim(len(rows) - 0.5, -0.5)
    counted.set_xlabel("million instructions")
    found.set_xlabel("hits of loads (%)")
    found.set_xlim(0, 101)
    for panel in (counted, found):
        panel.grid(axis="x", linewidth=0.4)
    handles: list[Artist] = [
        Patch(facecolor=colour, label=label)
        for colour, label in ((BLUE, "loads"), (ORANGE, "stores"), (GREEN, "other instructions"))
    ]
    handles += [
        found.plot([], [], color=c, marker="o" if level == "l1" else "s", ls="", label=label)[0]
        for level, c, label in HITS
    ]
    title = f"Instructions and cache hits of {result['models'][-1]}, batch {rows[0]['batch_size']}"
    footer = [f"counted by callgrind on {machine(result)}", *notes(result), *about(result)]
    return style.frame(drawn, title, handles, footer)


def _line(row: dict[str, Any]) -> list[str]:
    moved = row["loads"] + row["stores"]
    shares = [hits(row, level, kind) for kind in ("load", "store") for level in ("l1", "l2")]
    return [
        *(row["name"], row["layer"], row["kind"], row["pass"]),
        *(f"{M * row[key]:.3f}" for key in ("instructions", "loads", "stores")),
        f"{100 * moved / row['instructions']:.1f}" if row["instructions"] else "-",
        *("-" if share is None else f"{100 * share:.1f}" for share in shares),
    ]
