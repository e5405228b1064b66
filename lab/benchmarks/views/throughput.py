"""Show samples per second in training and in inference: against the batch, or by settings."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from lab.benchmarks.views.text import about, machine, ranged
from lab.draw import style
from lab.draw.looks import BLUE, COLOURS, VERMILLION
from lab.measure.intervals import Interval

G = 1e-9
LOOKS = {"training": ("o", "-", ":"), "inference": ("s", "--", "-.")}  # marker, line, knee's line
OF_WAYS = {"training": BLUE, "inference": VERMILLION}  # where there is one series
DEFAULT = "default"  # the series that changes nothing but the batch
HEADER = [
    *("batch", "step (ms)", "mad", "training (1/s)", "inference (1/s)", "GFLOP/s"),
    *("of the peak %", "products %"),
]


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each batch or set of settings."""
    lines = [HEADER, *(_line(row) for row in result["rows"])]
    if not _is_named(result):
        return lines
    return [
        [name, *line] for name, line in zip(["", *map(_name, result["rows"])], lines, strict=True)
    ]


def notes(result: dict[str, Any]) -> list[str]:
    """Name the knees, hold formulae to counts, and explain the columns."""
    peaks = [row["peak"] for row in result["rows"] if row["peak"]]
    texts = [f"{G * peak['flops_per_s']:.4g} GFLOP/s, {peak['source']}" for peak in peaks]
    rate = f" ({'; '.join(dict.fromkeys(texts))})" if texts else ""
    return [
        *_knees(result),
        *dict.fromkeys(_formula(row, result["unit"]) for row in result["rows"] if row["formula"]),
        f"medians of {result['num_rounds']} rounds in turns, 95 % intervals; GFLOP/s: counted "
        f"operations of training; of the peak{rate}",
        "products: share of the step's own time in matrix products, convolutions, attention and "
        "recurrent layers, by torch.profiler in one step",
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw both rates over the batch with their knees; or by settings, if no batches differ."""
    rows = sorted(result["rows"], key=lambda row: row["batch_size"])
    over_batches = bool(result["knees"])
    height = 3.8 if over_batches else 0.4 * len(rows) + 1.9
    drawn, axes = style.canvas(1, 1, 7.0, height)
    panel = axes[0][0]
    handles = _over_batches(panel, result, rows) if over_batches else _by_settings(panel, result)
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    if over_batches:
        title = f"Throughput of {models} by batch"
    else:
        batches = ", ".join(map(str, style.unique(row["batch_size"] for row in rows)))
        title = f"Throughput of {models}, batch {batches}"
    threads = result["environment"]["num_threads"]
    sample = (
        f"{threads} thread{'s' if threads > 1 else ''} · medians of {result['num_rounds']} rounds"
    )
    return style.frame(
        drawn, title, handles, [f"{machine(result)}, {sample}, 95 % intervals", *about(result)]
    )


def _over_batches(panel: Axes, result: dict[str, Any], rows: list[dict[str, Any]]) -> list[Artist]:
    handles: list[Artist] = []
    for number, name in enumerate(dict.fromkeys(row["series"] for row in rows)):
        of_series = [row for row in rows if row["series"] == name]
        for way, (marker, line, knee_line) in LOOKS.items():
            one = not _is_named(result)
            colour = OF_WAYS[way] if one else COLOURS[number % len(COLOURS)]
            look = {"color": colour, "marker": marker, "ls": line, "ms": 5}
            rates = [Interval.read(row[way]) for row in of_series]
            panel.errorbar(
                [row["batch_size"] for row in of_series],
                [rate.mid for rate in rates],
                yerr=style.whiskers(rates),
                capsize=3,
                **look,
            )
            label = way if one else f"{name or DEFAULT}: {way}"
            if name in result["knees"]:
                knee = result["knees"][name][way]
                panel.axvline(knee, color=colour, lw=1, ls=knee_line)
                label += f", knee {knee}"
            handles.append(Line2D([], [], label=label, **look))
    batches = style.unique(row["batch_size"] for row in rows)
    panel.set_xscale("log", base=2)
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.set_ylim(0)
    panel.set_xlabel("batch")
    panel.set_ylabel(f"{result['unit']}s/s")
    panel.grid(linewidth=0.4)
    return handles


def _by_settings(panel: Axes, result: dict[str, Any]) -> list[Artist]:
    rows, handles = result["rows"], list[Artist]()
    for way, (marker, *_) in LOOKS.items():
        rates = [Interval.read(row[way]) for row in rows]
        look = {"color": OF_WAYS[way], "marker": marker, "ls": "", "ms": 6}
        places, whiskers = range(len(rows)), style.whiskers(rates)
        panel.errorbar([rate.mid for rate in rates], places, xerr=whiskers, capsize=3, **look)
        handles.append(Line2D([], [], label=way, **look))
    one_batch = len({row["batch_size"] for row in rows}) == 1
    names = [_name(row) + ("" if one_batch else f", batch {row['batch_size']}") for row in rows]
    panel.set_yticks(range(len(rows)), names)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlim(0)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.set_xlabel(f"{result['unit']}s/s")
    panel.grid(linewidth=0.4)
    return handles


def _is_named(result: dict[str, Any]) -> bool:
    return any(row["series"] for row in result["rows"])


def _name(row: dict[str, Any]) -> str:
    return row["series"] or DEFAULT


def _knees(result: dict[str, Any]) -> list[str]:
    unit = result["unit"]
    lines = []
    for name, of_ways in result["knees"].items():
        knees = " and ".join(f"{batch} in {way}" for way, batch in of_ways.items())
        series = f" ({name or DEFAULT})" if _is_named(result) else ""
        lines.append(
            f"knee{series}: from a batch of {knees} on, a larger one adds less than 5 % to the "
            f"best rate of {unit}s per second"
        )
    return lines


def _formula(row: dict[str, Any], unit: str) -> str:
    counted, by_formula = row["forward_flops"], row["formula_flops"]
    return (
        f"{row['model']}: forward of one {unit} takes {G * counted:.4g} GFLOP as counted; "
        f"{row['formula']} (published) gives {G * by_formula:.4g}, {by_formula / counted:.3f} of it"
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
