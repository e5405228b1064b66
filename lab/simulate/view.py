"""Show predictions: a table for a terminal, and a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.analysis.figures.timeline import timeline_of_step
from lab.draw import style
from lab.draw.looks import Look, looks_of
from lab.draw.save import save
from lab.draw.text import aligned
from lab.measure.spans import Span
from lab.record.files import write_json
from lab.record.trace import read_trace, write_trace
from lab.simulate.fit import LINK
from lab.simulate.grid import summary as comparison
from lab.simulate.hardware import Hardware
from lab.simulate.request import DEFAULT_PROFILE
from lab.simulate.source import ESTIMATE

Row = dict[str, Any]
HEADER = ["strategy", "N", "batch", "times", "step ms", "exposed ms", "speedup", "efficiency"]
SCORES = ["measured ms", "error %", "exposed error %", "evidence"]
RATES = ("reduce_bytes_per_s", "codec_bytes_per_s")
FITTED = (*LINK, *RATES, "contention", "overhead_s", "crowding")


def table(result: Row) -> str:
    """Align a line for each cell, and add the notes."""
    rows = result["rows"]
    lines = aligned([[*HEADER, *SCORES], *(_line(row) for row in rows)])
    return "\n".join([*lines, "", *notes(result)])


def notes(result: Row) -> list[str]:
    """Say what was predicted, from what, and how far it may be trusted."""
    (name,) = {hardware["name"] for hardware in result["hardware"]}
    profiles = ", ".join(
        f"{name} ({size / 1e6:.1f} MB of gradients)" for name, size in result["profiles"].items()
    )
    bases = "/".join(dict.fromkeys(row["basis"] for row in result["rows"]))
    about = (
        f"predicted: {bases} {profiles}, hardware "
        f"{name}, {result['rows'][0]['scaling']} scaling; speedup over none at 1 rank"
    )
    return [about, *_estimates(result), *_open(result), *_fitted(result), *_held_out(result)]


def write(target: Path, result: Row) -> list[Path]:
    """Write the result as JSON and its figure next to it, or the figure alone into a PNG."""
    picture = target.with_suffix(".png")
    save(lambda: figure(result), picture)
    if target != picture:
        write_json(target, result)
    return list(dict.fromkeys((target, picture)))


def write_timeline(target: Path, result: Row, spans: Iterable[Span]) -> list[Path]:
    """Write the one cell's step as trace events, and a figure of it next to them.

    Args:
        spans: of one rank, which stands for all.
    """
    (row,) = result["rows"]
    facts = {key: row[key] for key in ("strategy", "world_size", "batch_size", "scaling")}
    facts |= {"model": ", ".join(result["profiles"]), "device": result["hardware"][0]["name"]}
    write_trace(target, spans, {**facts, "source": "predicted; one rank stands for all"})
    picture = target.with_suffix(".png")
    save(lambda: timeline_of_step(read_trace(target)), picture)
    return [target, picture]


def figure(result: Row) -> Figure:
    """Draw speedup over ranks, a panel for each batch; hollow marks are predicted."""
    rows = result["rows"]
    batch_sizes = style.unique(map(_fixed_batch_size, rows))
    looks = looks_of(row["series"] for row in rows)
    drawn, axes = style.canvas(1, len(batch_sizes), max(7.0, 2.8 * len(batch_sizes) + 2.4), 3.8)
    for panel, batch_size in zip(axes[0], batch_sizes, strict=True):
        here = [row for row in rows if _fixed_batch_size(row) == batch_size]
        sizes = style.unique(row["world_size"] for row in here)
        panel.plot(sizes, sizes, color=style.GREY, linestyle=":", linewidth=1)
        for name, look in looks.items():
            _draw(panel, [row for row in here if row["series"] == name], look)
        panel.set_title(
            f"{'per-rank' if rows[0]['scaling'] == 'weak' else 'global'} batch {batch_size}"
        )
        _size_axis(panel, sizes)
    axes[0][0].set_ylabel("speedup")
    handles = [_handle(name, look) for name, look in looks.items()]
    if any("measured_s" in row for row in rows):
        measured = Line2D([], [], color=style.GREY, marker="o", linestyle="", label="measured step")
        handles.append(measured)
    title = f"Predicted speedup over none at 1 rank, {rows[0]['scaling']} scaling"
    return style.frame(drawn, title, [*handles], notes(result))


def _fixed_batch_size(row: Row) -> int:
    """Return the batch size that stays as ranks are added: global, or per rank if weak."""
    return row["per_rank_batch_size" if row["scaling"] == "weak" else "batch_size"]


def _draw(panel: Axes, rows: list[Row], look: Look) -> None:
    """Draw a series: predictions as a line with hollow marks, measurements as filled marks."""
    rows = sorted(rows, key=lambda row: row["world_size"])
    known = [row for row in rows if "measured_s" in row]
    line: dict[str, Any] = {"color": look.colour, "marker": look.marker, "markersize": 5}
    x = [row["world_size"] for row in rows]
    y = [row["speedup"] for row in rows]
    panel.plot(x, y, linestyle=look.line, linewidth=1.2, markerfacecolor="white", **line)
    x = [row["world_size"] for row in known]
    panel.plot(x, [_measured_speedup(row) for row in known], linestyle="", **line)


def _measured_speedup(row: Row) -> float:
    """Compute the speedup of the measured step over the predicted step of one rank."""
    return row["speedup"] * row["step_s"] / row["measured_s"]


def _size_axis(panel: Axes, sizes: list[int]) -> None:
    panel.set_xlabel("ranks")
    panel.grid(linewidth=0.4)
    if sizes[-1] > 16:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
    else:
        panel.set_ylim(bottom=0)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.minorticks_off()


def _handle(name: str, look: Look) -> Line2D:
    drawn: dict[str, Any] = {"color": look.colour, "ls": look.line, "marker": look.marker}
    return Line2D([], [], markerfacecolor="white", label=f"{name} (predicted)", **drawn)


def _line(row: Row) -> list[str]:
    measured = "measured_s" in row
    return [
        row["series"],
        str(row["world_size"]),
        str(_fixed_batch_size(row)),
        row["basis"],
        f"{1e3 * row['step_s']:.2f}{_step_interval(row)}",
        f"{1e3 * row['exposed_s']:.2f}",
        f"{row['speedup']:.2f}{_interval(row['speedup_interval'])}",
        f"{row['efficiency']:.2f}",
        f"{1e3 * row['measured_s']:.2f}" if measured else "-",
        _percent(row["error"] if measured else math.nan),
        _percent(row.get("exposed_error", math.nan)),
        row["evidence"],
    ]


def _step_interval(row: Row) -> str:
    """Write the interval of an estimated step; that of a profile's is in the speedup."""
    low, high = row["step_s_interval"]
    return _interval((1e3 * low, 1e3 * high)) if row["basis"] == ESTIMATE else ""


def _interval(ends: tuple[float, float]) -> str:
    return f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends[0] < ends[1] else ""


def _percent(error: float) -> str:
    return "-" if math.isnan(error) else f"{100 * error:+.1f}"


def _open(result: Row) -> list[str]:
    """Say where the intervals come from."""
    keys = {each["key"] for hardware in result["hardware"] for each in hardware["assumed"]}
    if not any(row["basis"] == ESTIMATE for row in result["rows"]):
        keys = {key for key in keys if not key.startswith("device.")}  # a profile needs no device
    fitted = ["the fit"] if result["fit"] and not result["fit"].endswith(".json") else []
    sources = [*fitted, *sorted(keys)]
    return [f"in brackets, 95 % of what stays open: {', '.join(sources)}"] if sources else []


def _estimates(result: Row) -> list[str]:
    """Say which times are estimates, and which nobody asked for."""
    lines = [f"{s}; not measured" for s in result["sources"].values() if s.startswith(ESTIMATE)]
    if result["by_default"]:
        lines.append(
            f"neither a model nor a profile was given: profile={DEFAULT_PROFILE}; model=NAME "
            "estimates another"
        )
    return lines


def _fitted(result: Row) -> list[str]:
    if result["measured"]:
        return [comparison(result["rows"], result["measured"])]
    if not result["fit"]:
        return ["hardware as its file says; fit=runs/STUDY fits it to cells of 1 and 2 ranks"]
    cells = "" if result["fit"].endswith(".json") else "cells of 1 and 2 ranks of "
    return [
        f"fitted to {cells}{result['fit']}{at(hardware['conditions'])}: {_values(hardware)}"
        for hardware in result["hardware"]
    ]


def fitted_values(hardware: Hardware) -> str:
    """Write the values that a fit may change."""
    return _values(asdict(hardware))


def _values(hardware: Row) -> str:
    pair = hardware["intra"] if hardware["ranks_per_node"] > 1 else hardware["inter"]
    values = {name: {**hardware, **pair}[name] for name in FITTED}
    values |= {f"codec of {name}": rate for name, rate in hardware["codec_rates"]}
    return ", ".join(f"{name}={value:.3g}" for name, value in values.items() if value is not None)


def _held_out(result: Row) -> list[str]:
    """Summarise the errors on cells that were not fitted, for each group of conditions."""
    if result["measured"]:
        return []
    lines = [
        f"held out{at(score['conditions'])}: {score['text']}"
        for score in result["scores"]
        if score["num_cells"]
    ]
    return lines or ["no held-out cell: every prediction beyond what was fitted extrapolates"]


def at(conditions: str) -> str:
    """Name the conditions of a group, if there are several groups."""
    return f" at {conditions}" if conditions else ""
