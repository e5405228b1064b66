"""Show all-reduces by size: nccl-tests' columns, ratios to the library, shares of bounds."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lab.benchmarks.sizes import size_name
from lab.benchmarks.views.text import about, in_cache, machine, ranged, with_host_time
from lab.draw import style
from lab.draw.looks import Look, looks_of
from lab.measure.intervals import Interval

LIBRARY, SEND_RECV = "allreduce", "sendrecv"
HEADER = [
    *("algorithm", "size (B)", "count", "type", "time (us)", "mad", "algbw", "busbw", "#wrong"),
    *("ratio to allreduce", "of bound"),
]


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each size and algorithm."""
    rows = result["rows"]
    lines = with_host_time([HEADER, *(_line(row) for row in rows)], rows)
    for title, key in (("across (B)", "across_bytes"), ("link (B)", "link_bytes")):
        if any(row.get(key) for row in rows):
            texts = [title, *(str(row[key]) for row in rows)]
            lines = [[*line, text] for line, text in zip(lines, texts, strict=True)]
    return lines


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    return [
        f"medians of {result['num_rounds']} rounds on {result['world_size']} ranks "
        f"({result['backend']}); a call takes as long as on its slowest rank",
        "algbw, busbw: GB/s, busbw = algbw x 2(N-1)/N; ratio: of times, with 95 % intervals",
        *_notes_on_bounds(result["rows"]),
        *in_cache(result, min(row["size_bytes"] for row in result["rows"])),
    ]


def _notes_on_bounds(rows: list[dict[str, Any]]) -> list[str]:
    if not any(row.get("across_bytes") for row in rows):
        what = "what the busiest rank sends and receives"
        return [f"of bound: {what}, at the rate of sendrecv, / time"]
    text = "across: payload of a call that a host's ranks send to other hosts, of the busiest host"
    if any(row.get("link_bytes") for row in rows):
        text += "; link: what its interface counted, headers too"
    return [text, "of bound: time for across at the rate of sendrecv's across, / time"]


def figure(result: dict[str, Any]) -> Figure:
    """Draw bus bandwidth, ratio to the library's time, and share of the bound, by size."""
    rows = result["rows"]
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    looks = {**looks_of(name for name in names if name != SEND_RECV)}
    looks[SEND_RECV] = Look(style.GREY, ":", "x")
    drawn, axes = style.canvas(1, 3, 12.5, 4.2)
    for name in names:
        by_size = [row for row in rows if row["algorithm"] == name]
        look = looks[name]
        line: dict[str, Any] = {"color": look.colour, "ls": look.line, "marker": look.marker}
        if result["emulation"] != "none":
            line["markerfacecolor"] = "white"
        xs = [row["size_bytes"] for row in by_size]
        axes[0][0].plot(xs, [row["busbw_gb_per_s"] for row in by_size], **line)
        for panel, key in ((axes[0][1], "ratio_to_library"), (axes[0][2], "of_bound")):
            if name != (LIBRARY if key == "ratio_to_library" else SEND_RECV):
                _with_intervals(panel, xs, [row[key] for row in by_size], line)
    for panel in axes[0]:
        _size_axis(panel, sorted({row["size_bytes"] for row in rows}))
    for panel in axes[0][:2]:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[0][1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0][1].yaxis.set_minor_formatter(NullFormatter())
    axes[0][0].set(ylabel="bus bandwidth (GB/s)")
    axes[0][1].set(ylabel="time / the library's all-reduce (below 1: faster)")
    axes[0][2].set(ylabel="share of its bound (1: at the link's rate)", ylim=(0, None))
    handles: list[Artist] = [_handle(name, looks[name]) for name in names]
    sample = f"medians of {result['num_rounds']} interleaved rounds, 95 % bootstrap intervals"
    title = f"All-reduce of float32 on {result['world_size']} ranks, by size"
    return style.frame(drawn, title, handles, [f"{machine(result)} · {sample}", *about(result)])


def _line(row: dict[str, Any]) -> list[str]:
    is_library, is_plain = row["algorithm"] == LIBRARY, row["algorithm"] == SEND_RECV
    return [
        row["algorithm"],
        str(row["size_bytes"]),
        str(row["count"]),
        row["type"],
        f"{1e6 * row['time_s']['median']:.1f}",
        f"{1e6 * row['time_s']['mad']:.1f}",
        f"{row['algbw_gb_per_s']:.3f}",
        f"{row['busbw_gb_per_s']:.3f}",
        str(row["wrong"]),
        "1" if is_library else ranged(row["ratio_to_library"]),
        "1" if is_plain else ranged(row["of_bound"]),
    ]


def _with_intervals(
    panel: Axes, xs: list[int], values: list[dict[str, float | None] | None], line: dict[str, Any]
) -> None:
    known = [Interval.read(value) for value in values]
    bars = style.whiskers(known)
    panel.errorbar(xs, [value.mid for value in known], yerr=bars, capsize=2, elinewidth=1, **line)
    panel.axhline(1, color="black", linewidth=0.8, zorder=1)


def _size_axis(panel: Axes, sizes: list[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [size_name(size).replace(" ", "\n") for size in sizes])
    panel.minorticks_off()
    panel.set_xlabel("tensor")
    panel.grid(linewidth=0.4)


def _handle(name: str, look: Look) -> Line2D:
    text = {LIBRARY: "allreduce (the library's)", SEND_RECV: "plain send and recv"}.get(name, name)
    return Line2D([], [], color=look.colour, ls=look.line, marker=look.marker, label=text)
