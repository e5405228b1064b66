"""Show a result of lab.bench as a table and as a chart, from its JSON alone.

A benchmark's file has `measure(request)`, which returns a result, to be written as JSON, and raises
ConfigError if a setting does not fit the model, data, devices and ranks at hand. To show a result:

* `COLUMNS`, or `columns(result)` if they depend on it: what writes a cell, by the title of its
  column, for each of `result["rows"]`; or `table(result)`, a header and lines of cells, where lines
  are no such rows;
* `notes(result)`: lines that explain the columns;
* mostly `chart(result)`: see `Drawn`.

The functions here are those that these share.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.catalogue import BENCHES
from lab.benchmarks.request import BenchRequest, module_of
from lab.draw.chart import Chart
from lab.draw.text import aligned, number_of, short_text
from lab.measure.statistics import Interval, jointly
from lab.settings.storage import write_json

LONGEST = 400  # characters of a command in a figure
Result = dict[str, Any]
Row = Mapping[str, Any]
Column = Callable[[Row], str]
IntervalJson = dict[str, float | None]  # median, low, high
# The message of a chart, lines below it, and its body with its width, as lab.draw.plots returns it.
Drawn = tuple[str, list[str], tuple[Any, int]]


def present(request: BenchRequest, measured: Result) -> bool:
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
    notes = module_of(result["bench"]).notes(result)
    emulated = [f"emulated: {result['emulation']}"] if result["emulation"] != "none" else []
    return "\n".join([*aligned(table_of(result)), "", *notes, *emulated])


def table_of(result: Result) -> list[list[str]]:
    """Return a header, and lines of cells."""
    module = module_of(result["bench"])
    if hasattr(module, "table"):
        return module.table(result)
    columns = module.COLUMNS if hasattr(module, "COLUMNS") else module.columns(result)
    return tabulate(result["rows"], columns)


def tabulate(rows: Iterable[Row], columns: Mapping[str, Column]) -> list[list[str]]:
    """List a header, and a line for each row."""
    return [[*columns], *([write(row) for write in columns.values()] for row in rows)]


def write(path: Path, result: Result) -> list[Path]:
    """Write the result as JSON, and its figure next to it if this benchmark has one."""
    write_json(path, result)
    chart = chart_of(json.loads(path.read_text(encoding="utf-8")))
    return [path, *(chart.write(path.with_suffix(""), ["png"]) if chart else [])]


def chart_of(result: Result) -> Chart | None:
    """Return the chart of a result; None if its benchmark has none."""
    module = module_of(result["bench"])
    if not hasattr(module, "chart"):
        return None
    message, about, (body, width) = module.chart(result)
    how, command = result["emulation"], result["command"]
    if len(command) > LONGEST:
        command = f"{command[:LONGEST]} … (the result contains the whole command)"
    emulated = [] if how == "none" else [f"emulated: {how}"]
    return Chart(result["bench"], message, [*about, command, *emulated], body, width)


def value_at(row: Row, key: str) -> Any:
    """Look up a key such as `time_s.median`; None: one of its parts is missing or null."""
    found: Any = row
    for part in key.split("."):
        found = None if found is None else found.get(part)
    return found


def text(key: str) -> Column:
    """Write a value as it is; nothing if it is missing."""
    return lambda row: "" if (found := value_at(row, key)) is None else str(found)


def number(key: str, scale: float = 1.0, digits: int = 1, missing: str = "-") -> Column:
    """Write a number with so many decimals, `scale` times as large."""
    return lambda row: decimals(value_at(row, key), scale, digits, missing)


def decimals(value: float | None, scale: float = 1.0, digits: int = 1, missing: str = "-") -> str:
    """Write a number with so many decimals, `scale` times as large."""
    return missing if value is None else f"{scale * value:.{digits}f}"


def medians(title: str, key: str, scale: float, digits: int) -> dict[str, Column]:
    """Return two columns of times: medians, and median absolute deviations."""
    ends = {title: "median", "mad": "mad"}
    return {name: number(f"{key}.{end}", scale, digits) for name, end in ends.items()}


def intervals(key: str, scale: float = 1.0, reference: str = "-") -> Column:
    """Write an interval; `reference` if it is missing, as of the row that others are divided by."""
    return lambda row: reference if row.get(key) is None else ranged(row[key], scale)


def ranged(value: IntervalJson | None, scale: float = 1.0) -> str:
    """Format an interval as 1.02 [0.99, 1.05]; omit unknown ends; - if all is unknown."""
    known = Interval.read(value).scaled(scale)
    if math.isnan(known.mid):
        return "-"
    middle, low, high = map(short_text, (known.mid, known.lo, known.hi))
    return middle if math.isnan(known.lo) else f"{middle} [{low}, {high}]"


def ends(value: IntervalJson | None, scale: float = 1.0) -> dict[str, float]:
    """Return an interval as the columns value, low and high of a chart's data; NaN: unknown."""
    known = Interval.read(value).scaled(scale)
    return {"value": known.mid, "low": known.lo, "high": known.hi}


def in_cache(result: Result, smallest_bytes: int) -> list[str]:
    """Explain host times, and tell whether the smallest tensors stay in cache; only for a GPU."""
    cache = result.get("cache_bytes")
    if not cache:
        return []
    notes = ["host: time to queue a call; if it exceeds the call's time, launches are the limit"]
    if smallest_bytes <= cache:
        notes.append(f"tensors of up to {cache / 1e6:.0f} MB stay in the GPU's cache between calls")
    return notes


def host_column(rows: Iterable[Row]) -> dict[str, Column]:
    """Return the column of the host's time to queue a call, if any row has it."""
    known = any(row.get("host_s") for row in rows)
    return {"host (us)": number("host_s", 1e6, 1)} if known else {}


def fastest(
    ratios: Mapping[str, IntervalJson | None],
    reference: str,
    what: str = "time",
    num_starts: int = 1,
) -> str:
    """Say which of `ratios` to the reference's time is least, as far as intervals tell.

    As the least of several is looked for, their intervals are widened to hold together.

    Args:
        num_starts: that intervals are over; 1: they are over rounds.
    """
    freedom = num_starts - 1 if num_starts > 1 else math.inf
    read = {name: Interval.read(ratio) for name, ratio in ratios.items()}
    known = {name: jointly(ratio, len(read), freedom) for name, ratio in read.items()}
    faster = {name: ratio for name, ratio in known.items() if ratio.hi < 1}
    name, least = min((faster or known).items(), key=lambda item: item[1].mid)
    if faster:
        return f"{name} is fastest: {least.mid:.2f} × {reference}'s {what}"
    if least.lo > 1:
        slower = f"{name}, the nearest, takes {least.mid:.2f} × its {what}"
        return f"All are slower than {reference}: {slower}"
    if math.isnan(least.lo):
        return f"Too few rounds to be sure: {name} takes {least.mid:.2f} × {reference}'s {what}"
    return (
        f"None is significantly faster than {reference}; {name} takes {least.mid:.2f} × its {what}"
    )


def machine(result: Result) -> str:
    """Write the ranks, the device and the torch version of a result in a line."""
    where = result["environment"]
    cpu = f"{where['cpu']}, {number_of(where['num_cores'], 'core')}"
    device = ", ".join(sorted(set(where["gpus"]))) or cpu
    ranks = f"{ranks_of(result)} over {result['backend']} · " if "backend" in result else ""
    return f"{ranks}{device} · torch {where['torch']}"


def threaded(result: Result) -> str:
    """Write the machine and its threads in a line."""
    return f"{machine(result)}, {number_of(result['environment']['num_threads'], 'thread')}"


def medians_of(result: Result) -> str:
    """Write the machine, its threads and the rounds of a result in a line."""
    return f"{threaded(result)} · medians of {result['num_rounds']} interleaved rounds"


def ranks_of(result: Result) -> str:
    """Write the number of ranks: 1 rank, 2 ranks."""
    return number_of(result["world_size"], "rank")


def intervals_of(result: Result) -> str:
    """Write what a result's intervals are made of, as notes do."""
    starts = result.get("starts")
    if not starts:
        return "resample whole rounds" + (" of this one start" if "order_seed" in result else "")
    seeds = span([start["order_seed"] for start in starts], "d")
    return f"use Student's t over {len(starts)} fresh starts, order_seed={seeds}"


def on_ranks_of(result: Result) -> str:
    """Write on which ranks medians were taken, as notes do."""
    return f"on {ranks_of(result)} ({result['backend']})"


def span(values: Sequence[float], digits: str = ".3g") -> str:
    """Write the least and the largest value: "3 to 5", or "3" if they are alike."""
    return " to ".join(dict.fromkeys(f"{end:{digits}}" for end in (min(values), max(values))))
