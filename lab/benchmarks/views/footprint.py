"""Show memory of a training step by kind, as computed."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.benchmarks.views.text import about
from lab.draw import style
from lab.draw.looks import BLUE, BROWN, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from lab.layers.footprint import KINDS

MB = 1e-6
COLOURS = dict(zip(KINDS, (BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE, BROWN), strict=True))


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each set of settings, in MB; of a single one its modules."""
    memory_gb = result["memory_gb"]
    last = [f"batch in {memory_gb} GB"] if memory_gb else []
    if any(row["measured_bytes"] for row in result["rows"]):
        last = ["measured (MB)", "computed %", *last]
    header = ["", "parameters (M)", *(f"{kind} (MB)" for kind in KINDS), "peak (MB)", *last]
    lines = [header, *(_line(row) for row in result["rows"])]
    if len(result["rows"]) > 1:
        return lines
    blank = [""] * (len(header) - 4)
    modules = [
        [f"  {each['name']}", "", f"{MB * each['parameters']:.1f}", f"{MB * each['outputs']:.1f}"]
        for each in result["rows"][0]["modules"]
    ]
    head = ["by module", "", "parameters (MB)", "outputs (MB)"]
    return [*lines, *([*each, *blank] for each in (head, *modules))]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    measured = (
        "measured: resident memory above that before the model was built, by Linux's mark, on one "
        "thread, each row in a fresh process"
    )
    return [
        "computed, not measured: what a step's tensors hold at its peak on one rank, and what its "
        "exchange holds (num_ranks=); workspaces of libraries come on top",
        *([measured] if any(row["measured_bytes"] for row in result["rows"]) else []),
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw a bar for each set of settings, divided by kind."""
    rows = result["rows"]
    drawn, axes = style.canvas(1, 1, 8.0, 0.38 * len(rows) + 1.8)
    panel = axes[0][0]
    for place, row in enumerate(rows):
        begin = 0.0
        for kind in KINDS:
            width = MB * row["bytes"][kind]
            panel.barh(
                place, width, 0.7, left=begin, color=COLOURS[kind], edgecolor="white", lw=0.4
            )
            begin += width
        text = f"{begin:.0f}"
        panel.annotate(
            text, (begin, place), (5, 0), textcoords="offset points", va="center", size=8
        )
    panel.set_xlim(0, 1.15 * MB * max(row["total_bytes"] for row in rows))
    panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlabel("peak of a step (MB)")
    panel.grid(axis="x", linewidth=0.4)
    used = [kind for kind in KINDS if any(row["bytes"][kind] for row in rows)]
    handles: list[Artist] = [Patch(facecolor=COLOURS[kind], label=kind) for kind in used]
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    title = f"Memory of a training step of {models} by kind, computed"
    return style.frame(drawn, title, handles, [f"torch {_torch(result)}", *about(result)])


def _torch(result: dict[str, Any]) -> str:
    return result["environment"]["torch"]


def _line(row: dict[str, Any]) -> list[str]:
    kinds = [f"{MB * row['bytes'][kind]:.1f}" for kind in KINDS]
    most = [] if row["largest_batch"] is None else [str(row["largest_batch"])]
    total = f"{MB * row['total_bytes']:.1f}"
    if measured := row["measured_bytes"]:
        most = [f"{MB * measured:.1f}", f"{100 * row['total_bytes'] / measured:.1f}", *most]
    return [row["name"], f"{row['num_parameters'] / 1e6:.3f}", *kinds, total, *most]
