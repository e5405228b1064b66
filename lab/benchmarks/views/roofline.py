"""Show a model's layers under the roofs of a machine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.benchmarks.request import size_name
from lab.benchmarks.views.text import about, machine
from lab.draw import style
from lab.draw.looks import BLACK, BLUE, VERMILLION

G, MB = 1e-9, 1e-6
LOOKS = {"forward": (BLUE, "o"), "backward": (VERMILLION, "s")}
HEADER = [
    *("layer", "", "GFLOP", "MB", "FLOP/byte", "ms", "GFLOP/s", "bound by", "of the roof %"),
    "fusable MB",
]
NAMED = 6  # layers whose names are in the figure: those that take longest
CLOSE = (0.5, 0.06)  # decades, along x and y, in which two names would overlap


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each layer and direction."""
    return [HEADER, *map(_line, result["rows"])]


def notes(result: dict[str, Any]) -> list[str]:
    """Name the roofs, and what fusing could save."""
    roofs, rows = result["roofs"], result["rows"]
    copies = ", ".join(f"{_size(size)}{G * rate:.1f} GB/s" for size, rate in roofs["bytes_per_s"])
    loose, whole = (sum(row[key] for row in rows) for key in ("loose_bytes", "num_bytes"))
    most = sorted(rows, key=lambda row: -row["loose_bytes"])[:3]
    names = ", ".join(f"{r['layer']} {r['way']} {MB * r['loose_bytes']:.1f} MB" for r in most)
    return [
        f"{result['model']}, {result['batch_size']} {result['unit']}s; roofs ({roofs['source']}): "
        f"{G * roofs['flops_per_s']:.1f} GFLOP/s in products; copies: {copies}",
        "of the roof: the least time, by products or by memory, over the measured one; above 100 % "
        "where a cache kept what is counted as memory, or an algorithm multiplies less (Winograd, "
        "FFT)",
        "fusable: bytes of operations without products (ReLU, pooling, norms) beside a product of "
        f"the same layer, {MB * loose:.1f} of {MB * whole:.1f} MB in all; most: {names}",
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw each layer's rate over its operations per byte, under the roofs."""
    rows = [row for row in result["rows"] if row["flops"] and row["seconds"]]
    roofs = result["roofs"]
    drawn, axes = style.canvas(1, 1, 8.0, 4.8)
    panel = axes[0][0]
    x = [row["flops_per_byte"] for row in rows]
    fastest = max(rate for _, rate in roofs["bytes_per_s"])
    ends = np.array([min(*x, roofs["flops_per_s"] / fastest) / 2, 2 * max(x)])
    _roofs(panel, roofs, ends)
    longest: dict[str, Any] = {}  # a layer is named once, at the longer of its two
    for row in sorted(rows, key=lambda row: -row["seconds"]):
        longest.setdefault(row["layer"], row)
    named = _apart(list(longest.values()))[:NAMED]
    for row in rows:
        colour, marker = LOOKS[row["way"]]
        spot = row["flops_per_byte"], G * row["flops"] / row["seconds"]
        panel.plot(*spot, color=colour, marker=marker, ms=5, ls="", alpha=0.8)
        if row in named:
            panel.annotate(row["layer"], spot, (5, -9), textcoords="offset points", size=7)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("operations per byte (FLOP/byte)")
    panel.set_ylabel("GFLOP/s")
    panel.grid(linewidth=0.4)
    handles: list[Artist] = [
        Line2D([], [], color=colour, marker=marker, ls="", label=way)
        for way, (colour, marker) in LOOKS.items()
    ]
    handles.append(Line2D([], [], color=BLACK, lw=1.2, label="roofs of products\nand memory"))
    handles.append(Line2D([], [], color=BLACK, lw=1, ls=":", label="copies in caches"))
    title = f"Layers of {result['model']} at {result['batch_size']} {result['unit']}s"
    footer = [f"{machine(result)} · roofs: {roofs['source']}", *about(result)]
    return style.frame(drawn, title, handles, footer)


def _apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the first of rows whose marks are so close that their names would overlap."""
    kept: list[tuple[float, float]] = []
    found: list[dict[str, Any]] = []
    for row in rows:
        x, y = math.log10(row["flops_per_byte"]), math.log10(row["flops"] / row["seconds"])
        if all(abs(x - a) > CLOSE[0] or abs(y - b) > CLOSE[1] for a, b in kept):
            kept.append((x, y))
            found.append(row)
    return found


def _roofs(panel: Axes, roofs: dict[str, Any], ends: np.ndarray) -> None:
    peak = G * roofs["flops_per_s"]
    largest = max(size for size, _ in roofs["bytes_per_s"])
    for size, rate in roofs["bytes_per_s"]:
        corner = roofs["flops_per_s"] / rate
        x = np.array(sorted({ends[0], min(max(corner, ends[0]), ends[1]), ends[1]}))
        look: dict[str, Any] = {"lw": 1.2} if size == largest else {"lw": 1, "ls": ":"}
        panel.plot(x, np.minimum(peak, G * rate * x), color=BLACK, **look)


def _size(num_bytes: int) -> str:
    return f"of {size_name(num_bytes)} " if num_bytes else ""


def _line(row: dict[str, Any]) -> list[str]:
    ratio, share = row["flops_per_byte"], row["of_roof"]
    return [
        *(row["layer"], row["way"], f"{G * row['flops']:.3f}", f"{MB * row['num_bytes']:.2f}"),
        "-" if ratio is None else f"{ratio:.1f}",
        f"{1e3 * row['seconds']:.3f}",
        f"{G * row['flops'] / row['seconds']:.1f}" if row["seconds"] else "-",
        row["bound"],
        "-" if share is None else f"{100 * share:.0f}",
        f"{MB * row['loose_bytes']:.2f}",
    ]
