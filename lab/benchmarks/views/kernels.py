"""Show hardware counters of GPU kernels."""

from __future__ import annotations

import os
import re
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from lab.benchmarks.views.text import about
from lab.draw import style
from lab.draw.looks import BLUE, ORANGE
from lab.layers.kernels import adds_up
from lab.layers.trace import left_out

WIDTH = 56  # letters of a kernel's name
NUM_KERNELS, NUM_METRICS = 20, 6  # in the figure
UNNAMED = "__missing__"  # Kineto's word
LOOKS = ((BLUE, "sum over launches", True), (ORANGE, "mean, or extreme", False))
BREAK = re.compile(r"(.{16,}?[_.])")  # breaks lines in a metric's name
# Namespaces, also those of lambda functions: most of the length of a name in torch.
SCOPE = re.compile(r"(?:\(anonymous namespace\)|\{lambda\([^{}]*\)#\d+\}|\w+)::")


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, a line for each kernel, and one for all of them."""
    names = list(result["total"]["metrics"])
    return [
        ["", "launches", *_columns(names)],
        *(_line(_label(*each), each[1], names) for each in enumerate(result["rows"], start=1)),
        _line("all", result["total"], names),
    ]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns, and where cut names are whole."""
    start, end = _shared(list(result["total"]["metrics"]))
    shared = [f"metrics are named {start}…{end}"] if start or end else []
    skipped = left_out(result.get("skipped", {}))
    unnamed = any(row["name"] == UNNAMED for row in result["rows"])
    return [
        f"{result['trace']}: {result['num_events']} events; names are cut, and whole in out=FILE",
        *([f"left out: {skipped}"] if skipped else []),
        *shared,
        "metrics ending in .sum are added over launches, of .min and .max the extreme is shown, of "
        "all others the plain mean: such a trace has no times of kernels to weigh by",
        *([f"{UNNAMED}: kernels without a name in their library"] if unnamed else []),
    ]


def short(name: str) -> str:
    """Shorten a kernel's demangled name: no namespaces, and its end cut."""
    plain = SCOPE.sub("", name.removeprefix("void "))
    return plain if len(plain) <= WIDTH else f"{plain[: WIDTH - 1]}…"


def figure(result: dict[str, Any]) -> Figure:
    """Draw a panel for each of the first metrics that are not 0 everywhere."""
    rows, total = result["rows"][:NUM_KERNELS], result["total"]
    texts = dict(zip(total["metrics"], _columns(list(total["metrics"])), strict=True))
    names = [name for name, value in total["metrics"].items() if value] or list(texts)
    names = names[:NUM_METRICS]
    drawn, axes = style.canvas(
        1, len(names), 4.5 + 1.7 * len(names), 0.2 * len(rows) + 1.8, sharey=True
    )
    colours = {adds: colour for colour, _, adds in LOOKS}
    for panel, name in zip(axes[0], names, strict=True):
        values = [row["metrics"].get(name, 0.0) for row in rows]
        panel.barh(range(len(rows)), values, 0.8, color=colours[adds_up(name)])
        panel.set_xlabel(BREAK.sub("\\1\n", texts[name]), fontsize=7)
        panel.xaxis.set_major_locator(MaxNLocator(3))
        panel.xaxis.set_major_formatter(EngFormatter())
        panel.grid(axis="x", linewidth=0.4)
    first = axes[0][0]
    labels = [_label(*each) for each in enumerate(rows, start=1)]
    first.set_yticks(range(len(rows)), labels, fontsize=7)
    first.set_ylim(len(rows) - 0.5, -0.5)
    handles: list[Artist] = [
        Patch(facecolor=colour, label=label)
        for colour, label, adds in LOOKS
        if adds in map(adds_up, names)
    ]
    title = f"Counters of {len(rows)} of {len(result['rows'])} kernels in {result['trace']}"
    return style.frame(drawn, title, handles, [*notes(result), *about(result)])


def _label(place: int, row: dict[str, Any]) -> str:
    return f"{place} {short(row['name'])}"  # cut names may be equal


def _line(label: str, row: dict[str, Any], names: list[str]) -> list[str]:
    values = [row["metrics"].get(name) for name in names]
    texts = ["-" if value is None else f"{value:.5g}" for value in values]
    return [label, str(row["num_launches"]), *texts]


def _columns(names: list[str]) -> list[str]:
    start, end = _shared(names)
    return [name[len(start) : len(name) - len(end)] for name in names]


def _shared(names: list[str]) -> tuple[str, str]:
    """Return the words with which all names start and end."""
    if len(names) < 2:
        return "", ""
    start = re.sub(r"[^_.]*$", "", os.path.commonprefix(names))
    rests = [name[len(start) :][::-1] for name in names]
    end = re.sub(r"[^_.]*$", "", os.path.commonprefix(rests))[::-1]
    return start, end
