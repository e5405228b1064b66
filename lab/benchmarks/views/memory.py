"""Show peak memory of a step by strategy, next to theory."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.benchmarks.views.text import about, machine
from lab.draw import style
from lab.draw.looks import looks_of

MB = 1e-6
HEADER = ["", "peak (MB)", "mad", "theory (MB)", "peak/theory", "extra (MB)", "theory (MB)", "rank"]
HEADER += ["optimizer (MB)", "share of none"]


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each strategy."""
    return [HEADER, *(_line(row) for row in result["rows"])]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    parameters = result["rows"][0]["num_parameters"]
    return [
        f"medians of {result['rows'][0]['num_steps']} steady steps of the rank with the highest "
        f"peak, on {result['world_size']} ranks, each strategy in fresh processes",
        f"extra: besides what training {parameters / 1e6:.1f} M parameters needs without exchange "
        "(measured: the peak of none less its buffers)",
        "optimizer: tensors of its state, on the rank that has most",
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw a bar for each strategy's peak, and a mark where theory puts it."""
    rows = result["rows"]
    looks = looks_of(row["name"] for row in rows)
    drawn, axes = style.canvas(1, 1, 8.0, 0.38 * len(rows) + 1.6)
    panel = axes[0][0]
    for place, row in enumerate(rows):
        colour = looks[row["name"]].colour
        peak = MB * row["total_bytes"]
        panel.barh(place, peak, 0.6, color=colour, edgecolor="black", linewidth=0.4)
        text = f"{peak:.0f}"
        if row["theory_bytes"] is not None:
            theory = MB * row["theory_bytes"]
            panel.plot([theory, theory], [place - 0.42, place + 0.42], color="black", lw=2.5)
            text += f" ({row['of_theory']:.2f} × theory)"
            peak = max(peak, theory)
        panel.annotate(text, (peak, place), (5, 0), textcoords="offset points", va="center", size=8)
    panel.set_xlim(0, 1.35 * MB * max(row["total_bytes"] for row in rows))
    panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlabel("peak of a step, busiest rank (MB)")
    panel.grid(axis="x", linewidth=0.4)
    handles: list[Artist] = [
        Patch(facecolor="white", edgecolor="black", label="measured"),
        Line2D([], [], color="black", lw=2.5, label="theory"),
    ]
    title = f"Peak memory on {result['world_size']} ranks"
    sample = f"medians of {rows[0]['num_steps']} steady steps"
    return style.frame(drawn, title, handles, [f"{machine(result)} · {sample}", *about(result)])


def _line(row: dict[str, Any]) -> list[str]:
    known = row["theory_bytes"] is not None
    extra_theory = row["extra_theory_bytes"][row["rank"]]
    share = row["optimizer_share"]
    return [
        row["name"],
        f"{MB * row['total_bytes']:.1f}",
        f"{MB * row['peak_bytes'][row['rank']]['mad']:.1f}",
        f"{MB * row['theory_bytes']:.1f}" if known else "-",
        f"{row['of_theory']:.3f}" if known else "-",
        f"{MB * row['extra_bytes']:.1f}",
        f"{MB * extra_theory:.1f}" if known else "-",
        str(row["rank"]),
        f"{MB * max(row['optimizer_bytes']):.2f}",
        "-" if share is None else f"{share:.4f}",
    ]
