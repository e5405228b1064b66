"""Show a result of lab.bench as a table and as a chart, from its JSON alone.

A benchmark's file has `table(result)`, `notes(result)` and mostly `chart(result)` besides what it
measures; the functions here are those that these share.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lab.benchmarks.catalogue import BENCHES, module_of
from lab.benchmarks.request import Request
from lab.draw.chart import Chart
from lab.draw.text import aligned
from lab.measure.intervals import Interval
from lab.record.files import write_json

LONGEST = 400  # characters of a command in a figure
Result = dict[str, Any]
Row = dict[str, Any]
IntervalJson = dict[str, float | None]  # median, low, high


def present(request: Request, measured: Result) -> bool:
    """Print a result, write it and its figure to `out=`, and tell whether the values are right."""
    command = shlex.join(["python", "-m", "lab.bench", *request.arguments])
    result = {"bench": request.bench, "command": command, **measured}
    print(text_of(result))
    if out := request.own["out"]:
        print(f"wrote {' and '.join(map(str, write(out, result)))}")
    return not any(row.get("wrong") for row in result["rows"])


def is_result(value: object) -> bool:
    """Return whether a value, read from a file, is a result of a benchmark."""
    # A tuple, in which a value that cannot be hashed is merely absent: the file may hold anything.
    return isinstance(value, dict) and value.get("bench") in tuple(BENCHES)


def text_of(result: Result) -> str:
    """Align the result in columns, and add how to read them."""
    module = module_of(result["bench"])
    emulated = [f"emulated: {result['emulation']}"] if result["emulation"] != "none" else []
    return "\n".join([*aligned(module.table(result)), "", *module.notes(result), *emulated])


def write(path: Path, result: Result) -> list[Path]:
    """Write the result as JSON, and its figure next to it if this benchmark has one."""
    write_json(path, result)
    chart = chart_of(json.loads(path.read_text()))
    return [path, *(chart.write(path.with_suffix(""), ["png"]) if chart else [])]


def chart_of(result: Result) -> Chart | None:
    """Return the chart of a result; None if its benchmark has none."""
    module = module_of(result["bench"])
    return module.chart(result) if hasattr(module, "chart") else None


def tabulate(rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]]) -> list[list[str]]:
    """List a header, and a line for each row: columns map a title to a cell's text."""
    return [[*columns], *([write(row) for write in columns.values()] for row in rows)]


def in_cache(result: Result, smallest_bytes: int) -> list[str]:
    """Explain host times, and tell whether the smallest tensors stay in cache; only for a GPU."""
    cache = result.get("cache_bytes")
    if not cache:
        return []
    notes = ["host: what it takes to queue a call; above the call's time, launches are the limit"]
    if smallest_bytes <= cache:
        notes.append(f"tensors of up to {cache / 1e6:.0f} MB stay in the GPU's cache between calls")
    return notes


def host_column(rows: Iterable[Row]) -> dict[str, Callable[[Row], str]]:
    """Return the column of the host's time to queue a call, if any row has it."""
    if not any(row.get("host_s") for row in rows):
        return {}

    def microseconds(row: Row) -> str:
        return "-" if row.get("host_s") is None else f"{1e6 * row['host_s']:.1f}"

    return {"host (us)": microseconds}


def ranged(value: IntervalJson | None, scale: float = 1.0) -> str:
    """Format an interval as 1.02 [0.99, 1.05]; omit unknown ends; - if all is unknown."""
    known = Interval.read(value).scaled(scale)
    if math.isnan(known.mid):
        return "-"
    ends = "" if math.isnan(known.lo) else f" [{known.lo:.3g}, {known.hi:.3g}]"
    return f"{known.mid:.3g}{ends}"


def ends(value: IntervalJson | None, scale: float = 1.0) -> dict[str, float]:
    """Return an interval as the columns value, low and high of a chart's data; NaN: unknown."""
    known = Interval.read(value).scaled(scale)
    return {"value": known.mid, "low": known.lo, "high": known.hi}


def fastest(ratios: Mapping[str, IntervalJson | None], reference: str, what: str = "time") -> str:
    """Say which of `ratios` to the reference's time is least, as far as intervals tell."""
    known = {name: Interval.read(ratio) for name, ratio in ratios.items()}
    name, least = min(known.items(), key=lambda item: item[1].mid)
    if least.hi < 1:
        return f"{name} takes {least.mid:.2f} of {reference}'s {what}"
    if least.lo > 1:
        return f"{reference} beats all: {name}, the nearest, takes {least.mid:.2f} × its {what}"
    if math.isnan(least.lo):
        return f"{name} takes {least.mid:.2f} of {reference}'s {what}; too few rounds to be sure"
    return f"No other is told apart from {reference}: {name} takes {least.mid:.2f} of its {what}"


def machine(result: Result) -> str:
    """Write the ranks, the device and the torch version of a result in a line."""
    where = result["environment"]
    cores = f"{where['num_cores']} core{'s' if where['num_cores'] > 1 else ''}"
    device = ", ".join(sorted(set(where["gpus"]))) or f"{where['cpu']}, {cores}"
    ranks = f"{ranks_of(result)} over {result['backend']} · " if "backend" in result else ""
    return f"{ranks}{device} · torch {where['torch']}"


def ranks_of(result: Result) -> str:
    """Write the number of ranks: 1 rank, 2 ranks."""
    return f"{result['world_size']} rank{'s' if result['world_size'] > 1 else ''}"


def about(result: Result) -> list[str]:
    """List the last lines below a chart's title: the command, and how ranks were emulated."""
    how, command = result["emulation"], result["command"]
    if len(command) > LONGEST:
        command = f"{command[:LONGEST]} … (all of it stands in the result)"
    return [command, *([] if how == "none" else [f"emulated: {how}"])]
