"""Show samples per second against the batch, in training and in inference."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from lab.benchmarks.views.text import about, as_interval, machine, ranged
from lab.draw import style
from lab.draw.looks import BLUE, VERMILLION

G = 1e-9
LOOKS = {"training": (BLUE, "o", ":"), "inference": (VERMILLION, "s", "--")}
HEADER = [
    *("batch", "step (ms)", "mad", "training (1/s)", "inference (1/s)", "GFLOP/s"),
    *("of the peak %", "products %"),
]


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each batch."""
    return [HEADER, *(_line(row) for row in result["rows"])]


def notes(result: dict[str, Any]) -> list[str]:
    """Name the knees, and explain the columns."""
    knees = " and ".join(f"{batch} in {way}" for way, batch in result["knees"].items())
    peak = result["peak"]
    rate = f" ({G * peak['flops_per_s']:.4g} GFLOP/s, {peak['source']})" if peak else ""
    return [
        f"knee: from a batch of {knees} on, a larger one adds less than 5 % to the best rate of "
        f"{result['unit']}s per second",
        f"medians of {result['num_rounds']} rounds in turns, 95 % intervals; GFLOP/s: counted "
        f"operations of training; of the peak{rate}",
        "products: share of the step's own time in matrix products, convolutions, attention and "
        "recurrent layers, by torch.profiler in one step",
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw both rates over the batch, and mark the knees."""
    rows = sorted(result["rows"], key=lambda row: row["batch_size"])
    drawn, axes = style.canvas(1, 1, 7.0, 3.8)
    panel = axes[0][0]
    batches = [row["batch_size"] for row in rows]
    handles: list[Artist] = []
    for way, (colour, marker, line) in LOOKS.items():
        rates = [as_interval(row[way]) for row in rows]
        mids = [rate.mid for rate in rates]
        panel.errorbar(
            batches, mids, yerr=style.whiskers(rates), color=colour, marker=marker, ms=5, capsize=3
        )
        knee = result["knees"][way]
        panel.axvline(knee, color=colour, lw=1, ls=line)
        handles.append(Line2D([], [], color=colour, marker=marker, label=way))
        handles.append(Line2D([], [], color=colour, lw=1, ls=line, label=f"knee: {knee}"))
    panel.set_xscale("log", base=2)
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.set_ylim(0)
    panel.set_xlabel("batch")
    panel.set_ylabel(f"{result['unit']}s/s")
    panel.grid(linewidth=0.4)
    title = f"Throughput of {result['model']} by batch"
    threads = result["environment"]["num_threads"]
    sample = (
        f"{threads} thread{'s' if threads > 1 else ''} · medians of {result['num_rounds']} rounds"
    )
    return style.frame(
        drawn, title, handles, [f"{machine(result)}, {sample}, 95 % intervals", *about(result)]
    )


def _line(row: dict[str, Any]) -> list[str]:
    times = [f"{1e3 * row['step_s'][key]:.2f}" for key in ("median", "mad")]
    rates = [ranged(row["training"]), ranged(row["inference"])]
    flops, used, products = (row[k] for k in ("flops_per_s", "utilisation", "products_share"))
    return [
        *(str(row["batch_size"]), *times, *rates),
        f"{G * flops:.2f}" if flops else "-",
        *("-" if share is None else f"{100 * share:.1f}" for share in (used, products)),
    ]
