"""Show convolution algorithms on the layers of a model: times, operations, workspace and error."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.benchmarks.views.text import about, machine, ranged
from lab.convolution.algorithms import ALGORITHMS, LIBRARY
from lab.draw import style
from lab.draw.looks import BLACK, BLUE, BROWN, GREEN, ORANGE, PURPLE, SKY, VERMILLION

G, MB = 1e-9, 1e-6
COLOURS = dict(
    zip(ALGORITHMS, (BLACK, BLUE, SKY, VERMILLION, GREEN, ORANGE, PURPLE, BROWN), strict=False)
)
HEADER = [
    *("layer", "x", "pass", "algorithm", "time (ms)", "mad", "to library", "GFLOP", "executed"),
    *("workspace (MB)", "error", "ran"),
]
WIDE = 100  # times whose extremes differ more are drawn on a logarithmic axis
MOST_LAYERS = 13  # in a figure: those with the most operations


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, a line for each layer, pass and algorithm, and sums over the layers."""
    return [HEADER, *map(_line, result["rows"]), *(_sum(each) for each in result["sums"])]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns, and name the layers."""
    shapes = {row["layer"]: (row["count"], row["shape"]) for row in result["rows"]}
    best, library = (_seconds(result, name) for name in ("best of each", "library"))
    factors = [f"library {library / best:.2f}"]
    if any(each["algorithm"] == "gemm" for each in result["sums"]):
        factors.append(f"gemm everywhere {_seconds(result, 'gemm') / best:.2f}")
    return [
        *(f"{name} ({count}x): {shape}" for name, (count, shape) in shapes.items()),
        f"{result['model']}, {result['batch_size']} images; x: how many layers have these shapes",
        "executed: GFLOP with tiles, padding and transforms, as this algorithm is written here "
        "(of the library: unknown, shown as by definition); error: largest difference from float64 "
        "over the largest value",
        "sums leave out backward data of the first layer; where an algorithm refuses, the library "
        f"takes its place; times the sum of the best of each pass: {', '.join(factors)}",
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw executed operations and times of each layer by algorithm, forward and backward."""
    rows = result["rows"]
    sizes = {row["layer"]: row["operations"] for row in rows if row["pass"] == "forward"}
    layers = sorted(sorted(sizes, key=lambda name: -sizes[name])[:MOST_LAYERS], key=[*sizes].index)
    names = list(dict.fromkeys(row["algorithm"] for row in rows if row["time_s"]))
    drawn, axes = style.canvas(2, 1, max(7.5, 0.9 * len(layers) + 2.5), 6.4, sharex=True)
    by_name = {row["layer"]: {} for row in rows}
    for row in rows:
        by_name[row["layer"]].setdefault(row["algorithm"], []).append(row)
    counted, timed = axes[0][0], axes[1][0]
    _bars(counted, layers, names, by_name, _executed)
    for place, layer in enumerate(layers):
        total = 3 * G * sizes[layer]
        counted.plot([place - 0.45, place + 0.45], [total, total], color=BLACK, lw=1.2, ls="--")
    times = _bars(timed, layers, names, by_name, lambda row: 1e3 * _median(row))
    if max(times) > WIDE * min(times):
        timed.set_yscale("log")
    counted.set_ylabel("executed (GFLOP)")
    timed.set_ylabel("time (ms)")
    timed.set_xticks(range(len(layers)), [name.replace(".", "\n") for name in layers])
    handles: list[Artist] = [Patch(facecolor=COLOURS[name], label=name) for name in names]
    handles.append(Line2D([], [], color=BLACK, lw=1.2, ls="--", label="by definition"))
    title = f"Convolutions of {result['model']} at {result['batch_size']} images: three passes"
    largest = f" · the {len(layers)} of {len(sizes)} shapes with the most operations"
    left_out = "" if len(layers) == len(sizes) else largest
    threads = result["environment"]["num_threads"]
    footer = [
        f"{machine(result)}, {threads} thread{'s' if threads > 1 else ''} · medians of at least "
        "six interleaved rounds · forward, backward data and backward weights together; no bar: "
        f"refused for one of them, or (executed, of the library) not known{left_out}",
        *about(result),
    ]
    return style.frame(drawn, title, handles, footer)


def _bars(
    panel: Axes, layers: list[str], names: list[str], by_name: Any, value: Any
) -> list[float]:
    """Draw a group of bars for each layer, and return the heights of all bars there are."""
    width, drawn = 0.9 / len(names), list[float]()
    for number, name in enumerate(names):
        heights = [
            sum(map(value, by_name[layer][name]))
            if all(row["time_s"] for row in by_name[layer][name])
            else 0
            for layer in layers
        ]
        drawn += filter(None, heights)
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(layers))]
        panel.bar(places, heights, width, color=COLOURS[name], edgecolor="white", linewidth=0.3)
    panel.grid(axis="y", linewidth=0.4)
    panel.margins(x=0.01)
    return drawn


def _median(row: dict[str, Any]) -> float:
    return row["time_s"]["median"] if row["time_s"] else 0.0


def _executed(row: dict[str, Any]) -> float:
    """Return GFLOP; 0, so that no bar is drawn, for the library: what it executes is not known."""
    return 0.0 if row["algorithm"] == LIBRARY.name else G * row["executed"]


def _seconds(result: dict[str, Any], name: str) -> float:
    return next(each["seconds"] for each in result["sums"] if each["algorithm"] == name)


def _line(row: dict[str, Any]) -> list[str]:
    first = [row["layer"], str(row["count"]), row["pass"], row["algorithm"]]
    defined = f"{G * row['operations']:.3f}"
    if row["refused"]:
        return [*first, "refused", "", "", defined, "", "", "", row["refused"]]
    times = [f"{1e3 * row['time_s'][key]:.3f}" for key in ("median", "mad")]
    workspace = f"{MB * row['workspace_bytes']:.1f}"
    ran = row["implementation"] or ""
    counts = [defined, f"{G * row['executed']:.3f}", workspace]
    return [*first, *times, ranged(row["ratio"]), *counts, f"{row['error']:.1e}", ran]


def _sum(each: dict[str, Any]) -> list[str]:
    own = f"{each['num_own']} of {each['num_passes']} passes"
    name = each["algorithm"]
    texts = ["sum", "", "all", name, f"{1e3 * each['seconds']:.3f}", "", "", ""]
    return [*texts, f"{G * each['executed']:.3f}", "", "", own if name != "best of each" else ""]
