"""Instructions, loads, stores and cache hits of a model's layers, by callgrind, on CPUs.

With `trace=FILE`, the metrics of kernels that a GPU counted, by kernel. torch.profiler writes them
with CUPTI's range profiler: an event of category cuda_profiler_range for each launch, whose args
hold the metrics (Kineto, CuptiRangeProfiler.cpp).
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from lab.benchmarks.harness import joined
from lab.benchmarks.present import Drawn, Row, decimals, machine, number, tabulate, text
from lab.benchmarks.request import BenchRequest
from lab.device import callgrind
from lab.device.callgrind import output_of
from lab.device.transfer import about_trace, left_out, read_events, read_from
from lab.draw.chart import BLUE, GREEN, ORANGE, SKY, alt
from lab.draw.plots import BAR, GAP, bars
from lab.settings import storage
from lab.settings.config import ConfigError
from lab.settings.names import class_name
from lab.training.recording import benchmark_environment

LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")  # what these libraries may use
PROGRAM = (sys.executable, "-m", "lab.device.callgrind")
RECORDING = (
    "torch.profiler.profile(experimental_config=torch.profiler._ExperimentalConfig("
    'profiler_metrics=["dram__bytes_read.sum", ...], profiler_measure_per_kernel=True))'
)
M = 1e-6
HITS = {"l1": "L1", "l2": "L2, of L1's misses"}
COUNTED = {"loads": BLUE, "stores": ORANGE, "other instructions": GREEN}
WIDTH = 56  # letters of a kernel's name
NUM_KERNELS = 20  # in the figure
RANGE = "cuda_profiler_range"  # a category of events
UNIT = "__"  # a metric is named UNIT__COUNTER.ROLLUP, as in dram__bytes_read.sum
# Every other one, such as a rate or a share of the peak, has a plain mean: Kineto divides the
# trace's time evenly among the ranges, so there are no times to weigh by.
ROLLUPS: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "min": min, "max": max}
UNNAMED = "__missing__"  # Kineto's word
# Namespaces, also those of lambda functions: most of the length of a name in torch.
SCOPE = re.compile(r"(?:\(anonymous namespace\)|\{lambda\([^{}]*\)#\d+\}|\w+)::")


def measure(request: BenchRequest) -> dict[str, Any]:
    """Count all variants in one process under callgrind, and time the same process without it.

    With `trace=FILE`, read what was counted on a GPU.
    """
    if request.own["trace"]:
        return _read_kernels(request.own["trace"], request)
    configs = [variant.config for variant in request.variants]
    if any(config.device == "cuda" for config in configs):
        raise ConfigError(
            "device=cuda: the benchmark counts only on CPUs; for a GPU, give trace=FILE, "
            f"recorded with {RECORDING}"
        )
    with joined(configs[0]) as world:
        around = benchmark_environment(world, *configs)
    began = time.perf_counter()
    rows, own = _counted(request), request.own
    return {
        "rows": rows,
        "models": [class_name(config.model["_target_"]) for config in configs],
        "l1": own["l1"],
        "l2": own["l2"],
        "isa": own["isa"],
        "seconds": time.perf_counter() - began,
        "slowdown": sum(row["counted_s"] for row in rows) / sum(row["plain_s"] for row in rows),
        **around,
    }


def _counted(request: BenchRequest) -> list[dict[str, Any]]:
    own = request.own
    variables = os.environ | {name: own["isa"].upper() for name in LIMITS}
    variants = [json.dumps(list(variant.arguments)) for variant in request.variants]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        under = callgrind.command(out, own["l1"], own["l2"])  # refuses before minutes pass
        program = [*PROGRAM, str(callgrind.build_marks(Path(folder))), *variants]
        plain = json.loads(output_of(program, variables, "counters: "))  # finds errors in seconds
        print("counting under callgrind, which takes minutes", file=sys.stderr, flush=True)
        told = output_of([*under, *program], variables, "counters: callgrind failed: ")
        counted = json.loads(told)
        # Less the count of a call that does nothing; the first is a warm-up.
        _, empty, *counts = (
            callgrind.read(out.with_name(f"{out.name}.{number}"))
            for number in range(1, len(counted) + 2)
        )
    return [
        {
            "name": request.variants[row["variant"]].label,
            "batch_size": request.variants[row["variant"]].config.batch_size,
            **{key: row[key] for key in ("layer", "kind", "pass")},
            **{name: max(0, count - empty[name]) for name, count in found.items()},
            "counted_s": row["seconds"],
            "plain_s": timed["seconds"],
        }
        for found, row, timed in zip(counts, counted[1:], plain[1:], strict=True)
    ]


def _read_kernels(path: Path, request: BenchRequest) -> dict[str, Any]:
    """Combine the metrics of the trace at `path` by kernel.

    Raises:
        ConfigError: it cannot be read, or holds no metrics, or another setting is given.
    """
    for word in request.arguments[1:]:
        if not word.startswith(("trace=", "out=")):
            raise ConfigError(
                f"{word} has no effect with trace=, because the counts come from the trace"
            )
    events = read_events(path)
    skipped: Counter[str] = Counter()
    found = kernels_of(events, skipped)
    if not found or not found[0]["metrics"]:
        without = f"; left out: {left_out(skipped)}" if skipped else ""
        raise ConfigError(
            f"trace={path} contains no kernel metrics (events of category cuda_profiler_range)"
            f"{without}; to record them: {RECORDING}"
        )
    total, *kernels = found
    return {"rows": kernels, "total": total, **read_from(path, events, skipped)}


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a line for each pass of each layer; for each kernel, and one for all of them."""
    if "trace" in result:
        return _table_of_kernels(result)
    columns = {
        "": text("name"),
        "layer": text("layer"),
        "kind": text("kind"),
        "pass": text("pass"),
        **{f"{key} (M)": number(key, M, 3) for key in ("instructions", "loads", "stores")},
        "loads, stores %": lambda row: decimals(
            (row["loads"] + row["stores"]) / row["instructions"] if row["instructions"] else None,
            100,
        ),
        **{
            f"{level.upper()} {kind} hits %": partial(_hit, level=level, kind=kind)
            for kind in ("load", "store")
            for level in HITS
        },
    }
    return tabulate(result["rows"], columns)


def _hit(row: Row, level: str, kind: str) -> str:
    return decimals(hits(row, level, kind), 100)


def notes(result: dict[str, Any]) -> list[str]:
    if "trace" in result:
        return _notes_on_kernels(result)
    return [
        f"simulated data caches (bytes, ways, line): L1 {result['l1']}, L2 {result['l2']}; "
        "L2 hits are a percentage of L1 misses",
        f"caches are empty before each pass; oneDNN and MKL use {result['isa'].upper()}, on one "
        "thread",
        f"counting took {result['seconds']:.0f} s in all; a pass takes {result['slowdown']:.0f} "
        "times as long as without callgrind",
    ]


def hits(row: Row, level: str, kind: str) -> float | None:
    """Return a level's share of hits; None: it was not asked.

    Args: level: "l1" or "l2". kind: "load" or "store".
    """
    misses = row[f"{level}_{kind}_misses"]
    asked = row[f"{kind}s"] if level == "l1" else row[f"l1_{kind}_misses"]
    return 1 - misses / asked if asked else None


def chart(result: dict[str, Any]) -> Drawn:
    """Draw instructions, and hits of loads, of each layer's passes in the last variant."""
    if "trace" in result:
        return _chart_of_kernels(result)
    last = result["rows"][-1]["name"]
    rows = [row for row in result["rows"] if row["name"] == last]
    names = [f"{row['layer']} {row['pass']}" for row in rows]
    data = pd.DataFrame(
        {"name": name, "part": part, "value": M * value}
        for name, row in zip(names, rows, strict=True)
        for loads, stores in [(row["loads"], row["stores"])]
        for part, value in zip(
            COUNTED, (loads, stores, row["instructions"] - loads - stores), strict=True
        )
    )
    counted, width = bars(data, "million instructions", COUNTED, width=340)
    shares = pd.DataFrame(
        {"name": name, "level": text, "hits": 100 * share}
        for name, row in zip(names, rows, strict=True)
        for level, text in HITS.items()
        if (share := hits(row, level, "load")) is not None
    )
    level = alt.Scale(domain=list(HITS.values()), range=[BLUE, SKY])
    axis = alt.Axis(labels=False, ticks=False, grid=True)
    found = alt.Chart(shares).mark_point(filled=True, size=36, opacity=1)
    found = found.encode(
        alt.X("hits:Q", title="load hits (%)", scale=alt.Scale(domain=[0, 101], nice=False)),
        alt.Y("name:N", title=None, sort=names, scale=alt.Scale(domain=names), axis=axis),
        color=alt.Color("level:N", scale=level, legend=alt.Legend(columns=1)),
    ).properties(width=200, height=BAR * len(names))
    body = alt.hconcat(counted, found, spacing=GAP).resolve_scale(color="independent")
    moved, whole = (
        sum(row[key] for row in rows for key in keys)
        for keys in (("loads", "stores"), ("instructions",))
    )
    message = (
        f"{100 * moved / whole:.0f} % of the instructions of {result['models'][-1]} load or store, "
        f"at a batch of {rows[0]['batch_size']}"
    )
    about = [f"counted by callgrind on {machine(result)}", *notes(result)]
    return message, about, (body, width + 220)


def kernels_of(events: Iterable[dict[str, Any]], skipped: Counter[str] | None = None) -> list[Row]:
    """Combine the metrics of a trace by kernel.

    Args:
        skipped: counts what is left out, by reason: launches without a name or args, and metrics
            that are not finite or negative.

    Returns:
        The sum of all kernels first, named "all"; then each, by its largest share of any metric
        that adds up. Nothing if the trace has no such events. A row has all launches of a kernel on
        all GPUs: name, demangled, with its template's arguments, or that of a user's range;
        num_launches; metrics by name, without those that no launch has.
    """
    launches: dict[str, list[dict[str, float]]] = {}
    skipped = Counter() if skipped is None else skipped
    for event in events:
        if event.get("cat") == RANGE:
            name, args = event.get("name"), event.get("args")
            if isinstance(name, str) and isinstance(args, dict):
                launches.setdefault(name, []).append(_metrics(args, skipped))
            else:
                skipped["kernels without a name or args"] += 1
    if not launches:
        return []
    total = _kernel("all", [launch for each in launches.values() for launch in each])

    def rank(kernel: Row) -> tuple[float, int]:
        shares = (
            value / whole
            for metric, value in kernel["metrics"].items()
            if adds_up(metric) and (whole := total["metrics"][metric])
        )
        return -max(shares, default=0.0), -kernel["num_launches"]

    return [total, *sorted((_kernel(name, each) for name, each in launches.items()), key=rank)]


def adds_up(metric: str) -> bool:
    """Tell whether launches' values of a metric are added."""
    return metric.endswith(".sum")


def _metrics(args: dict[str, Any], skipped: Counter[str]) -> dict[str, float]:
    numbers = {name: storage.number(value) for name, value in args.items() if UNIT in name}
    found = {name: value for name, value in numbers.items() if value is not None}
    if len(found) < len(numbers):
        skipped["metrics that are not numbers from 0 to 2^63"] += len(numbers) - len(found)
    return found


def _kernel(name: str, launches: Sequence[dict[str, float]]) -> Row:
    values: dict[str, list[float]] = {}
    for launch in launches:
        for metric, value in launch.items():
            values.setdefault(metric, []).append(value)
    combined = {
        metric: ROLLUPS.get(metric.rpartition(".")[2], fmean)(each)
        for metric, each in values.items()
    }
    return {"name": name, "num_launches": len(launches), "metrics": combined}


def _table_of_kernels(result: dict[str, Any]) -> list[list[str]]:
    """List a header, a line for each kernel, and one for all of them."""
    metrics = {name: partial(_metric, name=name) for name in result["total"]["metrics"]}
    columns = {"": text("name"), "launches": text("num_launches"), **metrics}
    return tabulate([*_numbered(result["rows"]), result["total"]], columns)


def _metric(row: Row, name: str) -> str:
    value = row["metrics"].get(name)
    return "-" if value is None else f"{value:.5g}"


def _numbered(rows: Sequence[Row]) -> list[Row]:
    """Return kernels with short names, which may be equal, after their numbers."""
    return [
        {**row, "name": f"{place} {short(row['name'])}"} for place, row in enumerate(rows, start=1)
    ]


def _notes_on_kernels(result: dict[str, Any]) -> list[str]:
    """Explain the columns, and where cut names are whole."""
    events, *skipped = about_trace(result)
    unnamed = any(row["name"] == UNNAMED for row in result["rows"])
    return [
        f"{events}; names are shortened here; out=FILE has them in full",
        *skipped,
        "metrics ending in .sum are added over launches; for .min and .max the extreme is shown, "
        "and for all others the plain mean, because such a trace has no kernel times to weight by",
        *([f"{UNNAMED}: kernels without a name in their library"] if unnamed else []),
    ]


def short(name: str) -> str:
    """Shorten a kernel's demangled name: no namespaces, and its end cut."""
    plain = SCOPE.sub("", name.removeprefix("void "))
    return plain if len(plain) <= WIDTH else f"{plain[: WIDTH - 1]}…"


def _chart_of_kernels(result: dict[str, Any]) -> Drawn:
    """Draw the metric of whose sum the first kernel has the largest share."""
    rows, total = result["rows"], result["total"]["metrics"]
    shares = {
        name: rows[0]["metrics"].get(name, 0.0) / whole
        for name, whole in total.items()
        if adds_up(name) and whole
    }
    shown = max(shares or total, key=lambda name: shares.get(name, 0.0))
    message = f"{shown} of {len(rows)} kernels in {result['trace']}"
    if shares:
        message = f"{short(rows[0]['name'])} has {100 * shares[shown]:.0f} % of all {shown}"
    data = pd.DataFrame(
        {"name": row["name"], "part": shown, "value": row["metrics"].get(shown, 0.0)}
        for row in _numbered(rows[:NUM_KERNELS])
    )
    return message, _notes_on_kernels(result), bars(data, shown, {shown: BLUE})
