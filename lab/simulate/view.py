"""Show predictions: a table for a terminal, and a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lab.draw.chart import Chart, looks_of
from lab.draw.text import aligned, number_of
from lab.measure import Span
from lab.record.trace import read_trace, write_trace
from lab.settings.storage import write_json
from lab.simulate.estimate import ESTIMATE
from lab.simulate.hardware import CODEC_RATES
from lab.simulate.predict import DEFAULT_PROFILE, EXTRAPOLATED
from lab.simulate.score import NONE

Row = dict[str, Any]
HEADER = ["strategy", "N", "batch", "times", "step ms", "exposed ms", "speedup", "80 %"]
HEADER += ["efficiency", "measured ms", "error %", "exposed error %", "evidence"]
SAID_BELOW = {"times": ("profile", ESTIMATE), "evidence": (EXTRAPOLATED,)}  # of all rows
MOST_LINEAR = 16  # ranks: axes of more are logarithmic
MOST_DRAWN = 8  # series of a figure: more cannot be told apart


def table(result: Row) -> str:
    """Align a line for each cell, without columns that say nothing, and add the notes."""
    columns = [*zip(HEADER, *map(_line, result["rows"]), strict=True)]
    telling = [
        column
        for column in columns
        if {*column[1:]} not in [{"-"}, *({value} for value in SAID_BELOW.get(column[0], ()))]
    ]
    lines = aligned([[*line] for line in zip(*telling, strict=True)])
    return "\n".join([*lines, "", *notes(result)])


def notes(result: Row) -> list[str]:
    """Say what was predicted, from what, and how far it may be trusted."""
    sources = [_about(result), *result["logs"], *_estimates(result), *result["updates"]]
    if result["idle"]:
        sources.append(f"no effect on these steps: {', '.join(result['idle'])}")
    trust = [*_open(result), *_linear(result), *_fitted(result), *_held_out(result)]
    return [*sources, *trust]


def _about(result: Row) -> str:
    (name,) = {hardware["name"] for hardware in result["hardware"]}
    profiles = ", ".join(
        f"{name.removesuffix(f' ({ESTIMATE})')} ({size / 1e6:.1f} MB of gradients)"
        for name, size in result["profiles"].items()
    )
    bases = "/".join(dict.fromkeys(row["basis"] for row in result["rows"]))
    return (
        f"predicted: {bases} {profiles}, hardware {name}, {result['rows'][0]['scaling']} scaling; "
        "speedup over strategy=none on 1 rank"
    )


def write(target: Path, result: Row, figure: Chart | None) -> list[Path]:
    """Write a result as JSON and its figure next to it, or the figure alone into a PNG.

    Raises:
        OSError: a file cannot be written.
    """
    written = [] if target.suffix == ".png" else [target]
    for path in written:
        write_json(path, result)
    return [*written, *(figure.write(target.with_suffix(""), ["png"]) if figure else [])]


def write_timeline(target: Path, result: Row, spans: Iterable[Span]) -> list[Path]:
    """Write the one cell's step as trace events, and a figure of it next to them.

    Args:
        spans: of one rank, which stands for all.
    """
    from lab.analysis.runs import timeline_of_step

    (row,) = result["rows"]
    facts = {key: row[key] for key in ("strategy", "world_size", "batch_size", "scaling")}
    facts |= {"model": ", ".join(result["profiles"]), "device": result["hardware"][0]["name"]}
    write_trace(target, spans, {**facts, "source": "predicted; one rank represents all"})
    return [target, *timeline_of_step(read_trace(target)).write(target.with_suffix(""), ["png"])]


def chart(result: Row) -> Chart:
    """Chart the leaders' speedup over ranks, a panel for each batch; hollow marks are predicted."""
    # Tables need neither pandas nor Altair, which take most of a second to import.
    import pandas as pd

    from lab.draw.plots import Axis, lines

    rows, num_left_out = _leaders(result["rows"])
    sizes = sorted({row["world_size"] for row in rows})
    data: Any = pd.DataFrame(
        {
            "series": row["series"],
            "x": row["world_size"],
            "panel": _fixed_batch_size(row),
            "value": row["speedup"],
            "low": row["speedup_interval"][0],
            "high": row["speedup_interval"][1],
            # Of the measured step, over the predicted step of one rank.
            "measured": row["speedup"] * row["step_s"] / row.get("measured_s", math.nan),
            "ideal": float(row["world_size"]),
            "hollow": True,
        }
        for row in rows
    )
    base = 2 if sizes[-1] > MOST_LINEAR else 0
    x, y = (
        Axis("ranks", log=base, ticks=sizes),
        Axis("speedup", log=base, ticks=sizes if base else None),
    )
    scaling = rows[0]["scaling"]
    batch = "per-rank batch" if scaling == "weak" else "global batch"
    body, width = lines(
        *(data, x, y, looks_of(row["series"] for row in rows)),
        panels=lambda size: f"{batch} {size}",
        reference="ideal",
    )
    last = [row for row in rows if row["world_size"] == sizes[-1]]
    best = max([r for r in last if r["strategy"] != NONE] or last, key=lambda row: row["speedup"])
    number = f"{best['speedup']:,.0f}" if best["speedup"] >= 100 else f"{best['speedup']:.3g}"
    message = (
        f"Predicted: at most {number} × one rank, on {number_of(sizes[-1], 'rank')} with "
        f"{best['series']} at {batch} {_fixed_batch_size(best)}"
    )
    (name,) = {hardware["name"] for hardware in result["hardware"]}
    key = ["dotted: ideal", f"hollow: predicted, {', '.join(result['profiles'])} on {name}"]
    key += ["filled: measured"] if data["measured"].notna().any() else []
    key += ["vertical: 95 % intervals"] if (data["low"] < data["high"]).any() else []
    about = ["; ".join(key), *([f"fitted to {result['fit']}"] if result["fit"] else [])]
    about += [f"slower series left out: {num_left_out}"] if num_left_out else []
    about += _held_out(result) if result["fit"] else []
    return Chart("speedup", message, about, body, width)


def _leaders(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Return the rows of the series with the largest speedups; how many series are left out."""
    best = dict[str, float]()
    for row in rows:
        best[row["series"]] = max(row["speedup"], best.get(row["series"], 0.0))
    kept = sorted(best, key=best.__getitem__, reverse=True)[:MOST_DRAWN]
    return [row for row in rows if row["series"] in kept], len(best) - len(kept)


def _fixed_batch_size(row: Row) -> int:
    """Return the batch size that stays as ranks are added: global, or per rank if weak."""
    return row["per_rank_batch_size" if row["scaling"] == "weak" else "batch_size"]


def _line(row: Row) -> list[str]:
    measured = "measured_s" in row
    low, high = row["step_s_interval"]
    narrow = row.get("speedup_interval_80")
    # Of an estimated step; what a profile leaves open is in the speedup.
    interval = _interval((1e3 * low, 1e3 * high)) if row["basis"] == ESTIMATE else ""
    return [
        row["series"],
        str(row["world_size"]),
        str(_fixed_batch_size(row)),
        row["basis"],
        f"{1e3 * row['step_s']:.2f}{interval}",
        f"{1e3 * row['exposed_s']:z.2f}",
        f"{_short(row['speedup'])}{_interval(row['speedup_interval'])}",
        _interval(narrow).strip() if narrow else "-",
        f"{row['efficiency']:.2f}",
        f"{1e3 * row['measured_s']:.2f}" if measured else "-",
        _percent(row["error"] if measured else math.nan),
        _percent(row.get("exposed_error", math.nan)),
        row["evidence"],
    ]


def _interval(ends: tuple[float, float]) -> str:
    return f" [{_short(ends[0])}, {_short(ends[1])}]" if ends[0] < ends[1] else ""


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _percent(error: float) -> str:
    return "-" if math.isnan(error) else f"{100 * error:+z.1f}"


def open_values(result: Row, machines: Sequence[Row]) -> list[str]:
    """Name the uncertain values that make the intervals of a result's rows."""
    keys = {each["key"] for hardware in machines for each in hardware["assumed"]}
    if not any(row["basis"] == ESTIMATE for row in result["rows"]):
        keys = {key for key in keys if not key.startswith("device.")}  # a profile needs no device
    fitted = ["the fit"] if result["fit"] and not result["fit"].endswith(".json") else []
    terms = [
        f"terms learned from published scaling ({_medians(hardware['learned'])})"
        for hardware in machines
        if hardware["learned"]
    ]
    missed = any(each.get("residual") and not each["learned"] for each in machines)
    model = ["the cost model"] if missed else []
    profiles = [f"the fixed part of {name}'s times" for name in result["open_profiles"]]
    return [*fitted, *terms, *model, *profiles, *sorted(keys)]


def _medians(prior: Row) -> str:
    pairs = zip(prior["keys"], prior["means"], strict=True)
    return ", ".join(f"{key} {math.exp(mean):.3g}" for key, mean in pairs)


def _open(result: Row) -> list[str]:
    """Say where the intervals come from."""
    if not (sources := open_values(result, result["hardware"])):
        return []
    return [f"in brackets: 95 % intervals, given the uncertainty of {', '.join(sources)}"]


def _linear(result: Row) -> list[str]:
    """Say where a prediction is no better than linear scaling, that N ranks are N times as fast."""
    known = [row for row in result["rows"] if "speedup_interval_80" in row]
    if not known:
        return []
    ends = [row["speedup_interval_80"] for row in known]
    alike = [
        row
        for row, (low, high) in zip(known, ends, strict=True)
        if low <= row["world_size"] <= high
    ]
    sizes = ", ".join(str(size) for size in sorted({row["world_size"] for row in alike}))
    if not alike:
        return ["linear scaling (N ranks are N times as fast) is outside all 80 % intervals"]
    return [
        f"linear scaling (N ranks are N times as fast) is inside the 80 % interval of {len(alike)} "
        f"of {len(known)} predictions, at N = {sizes}, which are no better than linear scaling"
    ]


def _estimates(result: Row) -> list[str]:
    """Say which times are estimates, whose others are, and which nobody asked for."""
    lines = [
        f"{source}; not measured"
        if source.startswith(ESTIMATE)
        else f"compute times of {name} do not depend on hardware=; their source: {source}"
        for name, source in result["sources"].items()
    ]
    if result["by_default"]:
        lines.append(
            f"neither a model nor a profile was given, so profile={DEFAULT_PROFILE} is used; "
            "model=NAME estimates another model"
        )
    return lines


def _fitted(result: Row) -> list[str]:
    if folder := result["measured"]:
        errors = [abs(row["error"]) for row in result["rows"] if row["evidence"] == "measured"]
        if not errors:
            return [f"measured={folder}: has no cell with these settings"]
        return [
            f"compared with {number_of(len(errors), 'measured cell')} of {folder}: median error "
            f"{100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %"
        ]
    if not result["fit"]:
        return [
            "the hardware values come from the hardware file; fit=runs/STUDY fits them to cells on "
            "1 and 2 ranks"
        ]
    cells = "" if result["fit"].endswith(".json") else "the cells on 1 and 2 ranks in "
    return [
        f"fitted to {cells}{result['fit']}{at(hardware['conditions'])}: {values_of(hardware)}"
        for hardware in result["hardware"]
    ]


def values_of(hardware: Row) -> str:
    """Write the values that a fit has found."""
    keys = [key.rpartition(".") for key in hardware["fitted"]]
    values = dict[str, float]()
    for way, _, name in keys:
        if way == CODEC_RATES:
            values[f"codec of {name}"] = dict(hardware[way])[name]
        elif [other for _, _, other in keys].count(name) > 1:
            values[f"{way}.{name}"] = hardware[way][name]
        else:
            values[name] = (hardware[way] if way else hardware)[name]
    return ", ".join(f"{name}={value:.3g}" for name, value in values.items())


def _held_out(result: Row) -> list[str]:
    """Summarise the errors on cells that were not fitted, for each group of conditions."""
    if result["measured"]:
        return []
    if not result["fit"]:
        compared = any("measured_s" in row for row in result["rows"])  # with a trace
        why = "predictions were not compared with measured steps; measured=runs/STUDY does this"
        return [] if compared else [why]
    lines = [
        f"held out{at(score['conditions'])}: {score['text']}"
        for score in result["scores"]
        if score["num_cells"]
    ]
    return lines or ["no cell was held out, so the error beyond the fitted cells is unknown"]


def at(conditions: str) -> str:
    """Name the conditions of a group, if there are several groups."""
    return f" at {conditions}" if conditions else ""
