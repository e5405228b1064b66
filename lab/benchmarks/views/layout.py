"""Show what memory layouts cost: layers and steps in each, and the share of reorders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.benchmarks.views.text import about, machine, ranged
from lab.draw import style
from lab.draw.looks import BLACK, BLUE, GREEN, ORANGE, PURPLE
from lab.measure.intervals import Interval

MS = 1e3
COLOURS = {"NCHW": BLUE, "NHWC": ORANGE, "blocked": GREEN, "mixed": PURPLE}
HEADER = [
    *("layer", "x", "pass", "layout", "time (ms)", "to NCHW", "reorders", "(ms)", "copies"),
    *("(ms)", "both (%)", "from > to", "ran"),
]
MOST_LAYERS = 13  # in a figure: those that take longest


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a line for each layer, pass and layout, for sums over layers, and for steps."""
    *_, whole = result["sums"]
    return [
        HEADER,
        *map(_layer, result["rows"]),
        *(_line(["sum", "", "all"], row) for row in whole["layouts"]),
        *(_line(["step", "", ""], row) for row in result["steps"]),
    ]


def notes(result: dict[str, Any]) -> list[str]:
    """Name the layers, and explain the columns."""
    shapes = {row["layer"]: (row["count"], row["shape"]) for row in result["rows"]}
    return [
        *(f"{name} ({count}x): {shape}" for name, (count, shape) in shapes.items()),
        f"{result['model']}, {result['batch_size']} images; x: how many layers have these shapes; "
        f"medians of {result['num_rounds']} rounds in turns, [95 % intervals]",
        "the sum has what a step needs of all layers: no backward data of the first one",
        *_on_layouts(result),
        "copies: torch's, by its profiler; in a layer, changes of layout; in a step, all of them; "
        "both (%): reorders and copies, from other calls than the timed ones, of the time",
        "mixed: convolutions in NHWC, tensors between layers put back into NCHW, by copies",
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw the time of layers and of steps in each layout, with the part that reorders take."""
    *layers, _ = result["sums"]
    longest = sorted(layers, key=lambda each: -each["layouts"][0]["time_s"]["median"])
    shown = [each for each in layers if each in longest[:MOST_LAYERS]]
    width = max(7.5, 0.75 * len(shown) + 4.5)
    drawn, axes = style.canvas(1, 2, width, 3.9, width_ratios=[len(shown), 1])
    _bars(axes[0][0], [each["layouts"] for each in shown])
    _bars(axes[0][1], [result["steps"]])
    counts = {row["layer"]: row["count"] for row in result["rows"]}
    names = [each["layer"] for each in shown]
    times = [f"\n({counts[name]}x)" if counts[name] > 1 else "" for name in names]
    labels = [name.replace(".", "\n") + text for name, text in zip(names, times, strict=True)]
    axes[0][0].set_xticks(range(len(shown)), labels, fontsize=8)
    axes[0][1].set_xticks([0], ["whole step"], fontsize=8)
    axes[0][0].set_ylabel("ms per step")
    used = dict.fromkeys(row["layout"] for row in (*layers[0]["layouts"], *result["steps"]))
    handles: list[Artist] = [Patch(facecolor=COLOURS[name], label=name) for name in used]
    handles.append(Patch(facecolor=style.GREY, label="copies by torch"))
    handles.append(Patch(facecolor=BLACK, label="reorders"))
    title = f"Layouts: convolutions and steps of {result['model']}, batch {result['batch_size']}"
    threads = result["environment"]["num_threads"]
    left_out = "" if len(shown) == len(layers) else f" · the {len(shown)} of {len(layers)} shapes"
    footer = [
        f"{machine(result)}, {threads} thread{'s' if threads > 1 else ''} · medians of "
        f"{result['num_rounds']} interleaved rounds, 95 % intervals · forward and backward of all "
        "layers of the same shapes; reorders: changes of layout inside the library's "
        f"calls{left_out and f'{left_out} that take longest'}",
        *about(result),
    ]
    return style.frame(drawn, title, handles, footer)


def _bars(panel: Axes, groups: list[list[dict[str, Any]]]) -> None:
    """Draw a group of bars, one for each layout; reorders and copies are its lowest parts."""
    for place, rows in enumerate(groups):
        width = 0.85 / len(rows)
        for number, row in enumerate(rows):
            where = place + (number - (len(rows) - 1) / 2) * width
            time_s, colour = Interval.read(row["time_s"]), COLOURS[row["layout"]]
            error = style.whiskers([time_s], MS)
            panel.bar(where, MS * time_s.mid, width, color=colour, yerr=error, capsize=2)
            moved = MS * row["reorder_s"]
            panel.bar(where, moved, width, color=BLACK)
            panel.bar(where, MS * row["copy_s"], width, bottom=moved, color=style.GREY)
    panel.grid(axis="y", linewidth=0.4)
    panel.set_ylim(0)


def _on_layouts(result: dict[str, Any]) -> Iterator[str]:
    if result["device"] == "cuda":
        yield "reorders: cuDNN's kernels that change a layout, by name (no GPU has run this yet)"
    else:
        yield "reorders: by oneDNN's log; abcd: NCHW, acdb: NHWC, aBcd8b: channels in blocks of 8"
    if any(row["layout"] == "blocked" for row in result["rows"]):
        yield (
            "blocked: inputs and gradients as oneDNN's convolutions leave them; filters in NCHW, "
            "since torch trains no others"
        )


def _layer(row: dict[str, Any]) -> list[str]:
    formats = [f"{n}*{each}" if n > 1 else each for each, n in row["reorders"].items()]
    first = [row["layer"], str(row["count"]), row["pass"]]
    return [*_line(first, row)[:-2], " ".join(formats), row["ran"] or ""]


def _line(first: list[str], row: dict[str, Any]) -> list[str]:
    share = (row["reorder_s"] + row["copy_s"]) / row["time_s"]["median"]
    return [
        *(*first, row["layout"], ranged(row["time_s"], MS), ranged(row["ratio"])),
        *(str(sum(row["reorders"].values())), f"{MS * row['reorder_s']:.3f}"),
        *(str(row["num_copies"]), f"{MS * row['copy_s']:.3f}", f"{100 * share:.1f}", "", ""),
    ]
