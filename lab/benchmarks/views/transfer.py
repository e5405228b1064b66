"""Show copies between host and device, next to published ones."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.benchmarks.views.text import about
from lab.draw import style
from lab.draw.looks import COLOURS
from lab.layers.trace import left_out
from lab.layers.transfer import SIZES

MB, GB = 1e-6, 1e-9
HEADER = [
    *("", "memories", "copies", "MB", "kB each", "GB/s", "ms", "hidden %"),
    *("< 1 kB", "< 10 kB", "< 100 kB", "< 1 MB", "< 10 MB", "more"),
]
# Review of frameworks by NVIDIA (2017), slides 12 and 13: ten iterations on CIFAR-10. Slide 12
# prints 3.005 MB/s for the copies on the device; its own bytes over its time are 3.005 GB/s.
PUBLISHED = (
    ("HtoD", "published: TensorFlow", 107_912, 123.256e6, 221.538e-3),
    ("DtoH", "published: TensorFlow", 107_883, 220.186e6, 151.341e-3),
    ("DtoD", "published: TensorFlow", 64_615, 258.46e6, 86.024e-3),
    ("HtoD", "published: Caffe", 379, 172.955e6, 15.045e-3),
    ("DtoH", "published: Caffe", 571, 17.973e6, 2.283e-3),
    ("DtoD", "published: Caffe", 450, 508.779e6, 2.51e-3),
)


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, a line for each kind of copy, and the published ones."""
    return [HEADER, *map(_line, result["rows"]), *(_published(*each) for each in PUBLISHED)]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    skipped = left_out(result.get("skipped", {}))
    return [
        f"{result['trace']}: {result['num_events']} events; hidden: while a kernel ran on the same "
        "device",
        *([f"left out: {skipped}"] if skipped else []),
        "published: NVIDIA's review of frameworks, slides 12 and 13, ten iterations on CIFAR-10, "
        "on another GPU; compare sizes and numbers of copies, not times",
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw the number of copies by size, and their time, hidden and exposed."""
    rows = result["rows"]
    drawn, axes = style.canvas(1, 2, 10.0, 3.4)
    counts, times = axes[0]
    names = [f"{row['direction']}\n{row['kind']}" for row in rows]
    width = 0.8 / len(rows)
    for place, row in enumerate(rows):
        offset = (place - (len(rows) - 1) / 2) * width
        places = [bin_ + offset for bin_ in range(len(SIZES) + 1)]
        counts.bar(places, row["sizes"], width, color=COLOURS[place % len(COLOURS)])
        hidden, exposed = 1e3 * row["hidden_s"], 1e3 * (row["seconds"] - row["hidden_s"])
        colour = COLOURS[place % len(COLOURS)]
        times.barh(place, exposed, color=colour)
        times.barh(place, hidden, left=exposed, color="white", edgecolor=colour, hatch=style.HATCH)
    counts.set_xticks(range(len(SIZES) + 1), HEADER[-len(SIZES) - 1 :], fontsize=8)
    counts.set_ylabel("copies")
    counts.set_xlabel("size of a copy")
    times.set_yticks(range(len(rows)), names, fontsize=8)
    times.set_xlabel("time of copies (ms)")
    times.set_ylim(len(rows) - 0.5, -0.5)
    handles: list[Artist] = [
        Patch(facecolor=style.GREY, label="exposed"),
        Patch(facecolor="white", edgecolor=style.GREY, hatch=style.HATCH, label="behind kernels"),
    ]
    title = f"Copies in {result['trace']}"
    return style.frame(drawn, title, handles, about(result))


def _line(row: dict[str, Any]) -> list[str]:
    hidden = f"{100 * row['hidden_s'] / row['seconds']:.1f}" if row["seconds"] else "-"
    first = _figures(row["invocations"], row["num_bytes"], row["seconds"])
    return [row["direction"], row["kind"], *first, hidden, *map(str, row["sizes"])]


def _published(
    direction: str, source: str, invocations: int, num_bytes: float, seconds: float
) -> list[str]:
    blank = [""] * (len(SIZES) + 2)
    return [direction, source, *_figures(invocations, num_bytes, seconds), *blank]


def _figures(invocations: int, num_bytes: float, seconds: float) -> list[str]:
    return [
        str(invocations),
        f"{MB * num_bytes:.3f}",
        f"{1e-3 * num_bytes / invocations:.2f}",
        f"{GB * num_bytes / seconds:.3f}" if seconds else "-",
        f"{1e3 * seconds:.3f}",
    ]
