"""Show codecs: encode and decode against a memory-bound operation on the same tensors."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from lab.benchmarks.views.text import about, in_cache, machine, ranged, with_host_time
from lab.draw import style
from lab.draw.looks import BLUE, ORANGE
from lab.measure.intervals import Interval
from lab.model.profile import VALUE_BYTES

COLOURS = {"encode": BLUE, "decode": ORANGE}
TEXTS = {"encode": "encode, with the residual if it has one", "decode": "decode"}
HEADER = [
    *("codec", "", "bits/value", "time (ms)", "mad", "GB/s", "ratio", "of bandwidth"),
    *("over torch", "rounds", "#wrong"),
]


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, a line for the memory-bound operation, and two for each codec."""
    memory = result["reference"]
    first = [memory["name"], "", "", *_times(memory), "1", "1", "", str(memory["num_rounds"]), ""]
    lines = [HEADER, first, *(_line(row) for row in result["rows"])]
    return with_host_time(lines, [memory, *result["rows"]])


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    rows, columns = result["shape"]
    return [
        f"{result['num_values']} float32 values, {rows} rows of {columns}; {_engine(result)}",
        f"ratio: of times, to {result['reference']['name']} right before or after, with 95 % "
        "intervals; GB/s: of what must be read and written at least, once; over torch: time of its "
        "_reference in the same rounds over its own",
        *in_cache(result, VALUE_BYTES * result["num_values"]),
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw a mark for each operation of each codec: its time over the memory-bound one's."""
    names = list(dict.fromkeys(row["codec"] for row in result["rows"]))
    drawn, axes = style.canvas(1, 1, 8.5, 0.55 * len(names) + 1.6)
    panel = axes[0][0]
    hollow = result["emulation"] != "none"
    for row in result["rows"]:
        place = names.index(row["codec"]) + (0.17 if row["operation"] == "decode" else -0.17)
        _mark(panel, place, Interval.read(row["ratio"]), COLOURS[row["operation"]], hollow)
    _axes(panel, names)
    panel.set_xlabel(f"time / time of {result['reference']['name']}")
    handles: list[Artist] = [
        Line2D([], [], color=colour, marker="o", label=TEXTS[name])
        for name, colour in COLOURS.items()
    ]
    counts = sorted({row["num_rounds"] for row in result["rows"]})
    rounds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    sample = f"medians of {rounds} interleaved rounds, 95 % bootstrap intervals"
    title = f"Codecs on {result['num_values'] / 1e6:.3g} M values, against memory"
    footer = [f"{machine(result)} · {_engine(result)} · {sample}", *about(result)]
    return style.frame(drawn, title, handles, footer)


def _mark(panel: Axes, place: float, ratio: Interval, colour: str, hollow: bool) -> None:
    """Draw a ratio with its interval and its number, and a bar from 1 to it."""
    bar: dict[str, Any] = {"lw": 4, "alpha": 0.3, "solid_capstyle": "butt"}
    panel.plot([1, ratio.mid], [place, place], color=colour, **bar)
    mark: dict[str, Any] = {"color": colour, "markerfacecolor": "white" if hollow else colour}
    error = style.whiskers([ratio])
    panel.errorbar(ratio.mid, place, xerr=error, marker="o", ms=5, capsize=3, **mark)
    end = max(1, ratio.mid if math.isnan(ratio.hi) else ratio.hi)
    text: dict[str, Any] = {"textcoords": "offset points", "va": "center", "size": 8}
    panel.annotate(f"{ratio.mid:.3g}", (end, place), (6, 0), **text)


def _axes(panel: Axes, names: list[str]) -> None:
    panel.set_xscale("log")
    low, high = panel.get_xlim()
    panel.set_xlim(min(low, 0.5), 2 * high)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.axvline(1, color="black", linewidth=1)
    panel.grid(axis="x", linewidth=0.4)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)


def _engine(result: dict[str, Any]) -> str:
    kernels, threads = result["kernels"], result["environment"]["num_threads"]
    if result["device"] == "cuda":
        return f"on {kernels['device']}, kernels {kernels['level']}"
    return f"{threads} threads, kernels {kernels['level']} ({kernels['compiler']})"


def _line(row: dict[str, Any]) -> list[str]:
    return [
        row["codec"],
        row["operation"],
        f"{row['bits_per_value']:.3f}",
        *_times(row),
        ranged(row["ratio"]),
        ranged(row["of_bandwidth"]),
        ranged(row["over_torch"]),
        str(row["num_rounds"]),
        str(row["wrong"]),
    ]


def _times(row: dict[str, Any]) -> list[str]:
    times = [f"{1e3 * row['time_s'][key]:.3f}" for key in ("median", "mad")]
    return [*times, f"{row['gb_per_s']:.2f}"]
