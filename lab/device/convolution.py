"""Convolution algorithms on the layers of a model: time, operations, workspace and error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from lab.benchmarks import harness
from lab.benchmarks.present import Drawn, number, ranged, threaded
from lab.benchmarks.request import BenchRequest
from lab.convolution import Algorithm, Pass, Problem
from lab.convolution.algorithms import ALGORITHMS, LIBRARY
from lab.convolution.layer import calls_of, convolutions_of
from lab.device.formats import implementation
from lab.distributed.world import World
from lab.draw.chart import (
    BLACK,
    BLUE,
    BROWN,
    GREEN,
    INK,
    LABEL_PX,
    LETTER,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    alt,
)
from lab.draw.plots import GAP, Axis, legend_columns
from lab.problem import blueprint
from lab.settings.config import ConfigError
from lab.settings.names import class_name

BUDGET_S = 3.0  # of one operation: a slow one takes part in fewer rounds, but in enough
CHECKED_BATCH = 1  # images on which errors are taken: the float64 reference is slow
BEST = "best of each"
G, MB, MS = 1e-9, 1e-6, 1e3
COLOURS = dict(
    zip(ALGORITHMS, (BLACK, BLUE, SKY, VERMILLION, GREEN, ORANGE, PURPLE, BROWN), strict=False)
)
HEADER = [
    *("layer", "x", "pass", "algorithm", "time (ms)", "mad", "to library", "GFLOP", "executed"),
    *("workspace (MB)", "error", "ran"),
]
MOST_LAYERS = 13  # in a figure: those with the most operations
PANEL, ROW = 300, 24  # pixels of a panel, and of a layer's row

Row = dict[str, Any]
Refused = dict[tuple[Algorithm, Pass], str | None]


@harness.on_one_rank
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    """Measure every algorithm on every convolution of the model, all passes."""
    config, names = request.config, request.own["algorithm"]
    for name in names or ():
        if name not in ALGORITHMS:
            raise ConfigError(
                f"algorithm={name}: no such algorithm; allowed: {', '.join(ALGORITHMS)}"
            )
    chosen = [a for n, a in ALGORITHMS.items() if not names or n in names or a is LIBRARY]
    rows = [
        {**row, "is_first": place == 0}
        for place, problem, layers in announced(distinct_convolutions(config))
        for row in _measured(problem, layers, chosen, world.device, request.own["rounds"])
    ]
    return {
        "rows": rows,
        "sums": sums(rows),
        "model": class_name(config.model["_target_"]),
        "batch_size": config.batch_size,
        "device": world.device.type,
    }


def sums(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up seconds and operations over layers for each algorithm, and for the best of each pass.

    Where an algorithm refuses, the library takes its place. Backward data of the first layer is
    left out: no step needs it.
    """
    passes: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if not (row["is_first"] and row["pass"] == Pass.BACKWARD_DATA):
            passes.setdefault((row["layer"], row["pass"]), {})[row["algorithm"]] = row
    names = dict.fromkeys(row["algorithm"] for row in rows)
    chosen = {
        name: [found[name if found[name]["time_s"] else LIBRARY.name] for found in passes.values()]
        for name in names
    }
    chosen[BEST] = [
        min((row for row in found.values() if row["time_s"]), key=_seconds)
        for found in passes.values()
    ]
    return [
        {
            "algorithm": name,
            "seconds": sum(row["count"] * _seconds(row) for row in of_all),
            "executed": sum(row["count"] * row["executed"] for row in of_all),
            "num_own": sum(row["algorithm"] == name for row in of_all),
            "num_passes": len(of_all),
        }
        for name, of_all in chosen.items()
    ]


def distinct_convolutions(config: DictConfig) -> dict[Problem, list[str]]:
    """Return the names of the layers of each distinct problem of a run's model.

    Raises:
        ConfigError: there is none.
    """
    plan = blueprint(config)
    data = plan.data
    found = convolutions_of(plan.model, data.input_shape, data.input_dtype, config.batch_size)
    if not found:
        model = config.model["_target_"]
        raise ConfigError(f"model={model} has no 2-d convolution; use a model that has one")
    layers: dict[Problem, list[str]] = {}
    for name, problem in found.items():
        layers.setdefault(problem, []).append(name)
    return layers


def announced(layers: Mapping[Problem, list[str]]) -> Iterator[tuple[int, Problem, list[str]]]:
    """Yield a number, a problem and its layers' names, and print them."""
    for place, (problem, names) in enumerate(layers.items()):
        print(f"[{place + 1}/{len(layers)}] {names[0]}: {described(problem)}", flush=True)
        yield place, problem, names


def shapes_of(result: dict[str, Any]) -> list[str]:
    """Write how many layers have the shapes of each that was measured, and which."""
    shapes = {row["layer"]: (row["count"], row["shape"]) for row in result["rows"]}
    return [f"{name} ({count}x): {shape}" for name, (count, shape) in shapes.items()]


def described(problem: Problem) -> str:
    """Write the shapes of a problem, as in "64x27x27 -> 192, 5x5, pad 2"."""
    height, width = problem.size
    text = f"{problem.channels}x{height}x{width} -> {problem.filters}, "
    text += "x".join(map(str, problem.kernel))
    for name, value, plain in (
        ("stride", problem.stride, (1, 1)),
        ("pad", problem.padding, (0, 0)),
    ):
        if value != plain:
            text += f", {name} {value[0]}" if value[0] == value[1] else f", {name} {value}"
    return text + (f", {problem.groups} groups" if problem.groups > 1 else "")


def _seconds(row: dict[str, Any]) -> float:
    return row["time_s"]["median"]


def _measured(
    problem: Problem,
    names: list[str],
    algorithms: list[Algorithm],
    device: torch.device,
    num_rounds: int,
) -> list[Row]:
    """Return a row for each pass of a problem by each algorithm."""
    tensors = problem.draw(device)
    refused = {(a, which): a.refusal(problem, which) for a in algorithms for which in Pass}
    errors = _errors(replace(problem, batch=CHECKED_BATCH), refused, device)
    calls = {done: _call(*done, problem, *tensors) for done in errors}
    ran = {done: implementation(call) for done, call in calls.items() if done[0] is LIBRARY}
    num_calls = harness.NUM_CALLS if device.type == "cuda" else 1

    def seconds(call: Callable[[], Tensor]) -> float:
        return harness.per_call(call, num_calls, device).call_s

    takes = [partial(seconds, call) for call in calls.values()]
    taken = harness.take_turns(
        takes, num_rounds, wants=harness.within(BUDGET_S, harness.ENOUGH_ROUNDS)
    )
    times = dict(zip(calls, taken, strict=True))
    rows = []
    for (algorithm, which), reason in refused.items():
        done = algorithm, which
        call_s, library_s = times.get(done), times[LIBRARY, which]
        cost = algorithm.total(problem, which)
        paired = min(len(call_s or ()), len(library_s))
        rows.append(
            {
                "layer": names[0],
                "count": len(names),
                "shape": described(problem),
                "pass": str(which),
                "algorithm": algorithm.name,
                "refused": reason,
                "operations": problem.operations,
                "executed": cost.operations,
                "workspace_bytes": cost.workspace_bytes,
                "time_s": harness.middle(call_s) if call_s else None,
                "num_rounds": len(call_s or ()),
                "ratio": harness.ratio(call_s[:paired], library_s[:paired]) if call_s else None,
                "error": errors.get(done),
                "implementation": ran.get(done),
            }
        )
    return rows


def _call(
    algorithm: Algorithm, which: Pass, problem: Problem, *tensors: Tensor
) -> Callable[[], Tensor]:
    return calls_of({which: algorithm}, problem, *tensors)[which]


def _errors(
    problem: Problem, refused: Refused, device: torch.device
) -> dict[tuple[Algorithm, Pass], float]:
    """Return each algorithm's largest error against float64, relative to the largest value."""
    tensors = problem.draw(device)
    wide = tuple(tensor.double() for tensor in tensors)
    true = {which: _call(LIBRARY, which, problem, *wide)() for which in Pass}
    errors: dict[tuple[Algorithm, Pass], float] = {}
    for (algorithm, which), reason in refused.items():
        if reason is None:
            found = _call(algorithm, which, problem, *tensors)()
            far = (found - true[which]).abs().max() / true[which].abs().max()
            errors[algorithm, which] = float(far)
    return errors


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, a line for each layer, pass and algorithm, and sums over the layers."""
    return [HEADER, *map(_line, result["rows"]), *(_sum(each) for each in result["sums"])]


def _line(row: dict[str, Any]) -> list[str]:
    first = [row["layer"], str(row["count"]), row["pass"], row["algorithm"]]
    defined = f"{G * row['operations']:.3f}"
    if row["refused"]:
        return [*first, "refused", "", "", defined, "", "", "", row["refused"]]
    times = [number(f"time_s.{key}", MS, 3)(row) for key in ("median", "mad")]
    workspace = f"{MB * row['workspace_bytes']:.1f}"
    ran = row["implementation"] or ""
    counts = [defined, f"{G * row['executed']:.3f}", workspace]
    return [*first, *times, ranged(row["ratio"]), *counts, f"{row['error']:.1e}", ran]


def _sum(each: dict[str, Any]) -> list[str]:
    own = f"{each['num_own']} of {each['num_passes']} passes"
    name = each["algorithm"]
    texts = ["sum", "", "all", name, f"{1e3 * each['seconds']:.3f}", "", "", ""]
    return [*texts, f"{G * each['executed']:.3f}", "", "", own if name != BEST else ""]


def notes(result: dict[str, Any]) -> list[str]:
    return [
        *shapes_of(result),
        f"{result['model']}, {result['batch_size']} images; x: how many layers have these shapes",
        "executed: GFLOP including tiles, padding and transforms, as this algorithm is written "
        "here (unknown for the library, so the definition is shown); error: largest difference "
        "from float64, divided by the largest value",
        "sums leave out the first layer's backward data; where an algorithm does not support a "
        "pass, the library replaces it",
    ]


def chart(result: dict[str, Any]) -> Drawn:
    """Draw executed operations and times of each layer by algorithm, forward and backward."""
    rows = result["rows"]
    sizes = {row["layer"]: row["operations"] for row in rows if row["pass"] == "forward"}
    layers = sorted(sorted(sizes, key=lambda name: -sizes[name])[:MOST_LAYERS], key=[*sizes].index)
    passes: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        passes.setdefault((row["layer"], row["algorithm"]), []).append(row)
    data = pd.DataFrame(
        {
            "layer": layer,
            "algorithm": name,
            # What the library executes is not known, and is not drawn.
            "executed": None if name == LIBRARY.name else G * sum(row["executed"] for row in each),
            "defined": 3 * G * sizes[layer],
            "time": MS * sum(_seconds(row) for row in each),
        }
        for (layer, name), each in passes.items()
        if layer in layers and all(row["time_s"] for row in each)
    )
    panels = [
        _panel(data, "executed", "executed (GFLOP); line: by definition", names=layers),
        _panel(data, "time", "time (ms)", names=layers, labelled=False),
    ]
    room = LETTER * LABEL_PX * max(map(len, layers)) + 60
    seconds = {each["algorithm"]: each["seconds"] for each in result["sums"]}
    share = seconds[BEST] / seconds[LIBRARY.name]
    message = (
        f"Convolutions of {result['model']}: the best of each pass takes {share:.2f} × the "
        "library's time"
    )
    sample = [
        f"{threaded(result)}, {result['batch_size']} images",
        "forward and backward together; medians of at least six interleaved rounds",
        "no dot: the algorithm does not support a pass, or what the library executes is unknown",
    ]
    if len(layers) < len(sizes):
        sample.append(f"the {len(layers)} of {len(sizes)} shapes with the most operations")
    body = alt.hconcat(*panels, spacing=GAP)
    return message, sample, (body, int(2 * PANEL + GAP + room))


def _panel(data: Any, value: str, title: str, names: list[str], labelled: bool = True) -> Any:
    """Draw a dot for each algorithm in each layer's row, on a logarithmic axis."""
    known = data[data[value].notna()]
    used = [name for name in COLOURS if name in set(data["algorithm"])]
    scale = alt.Scale(domain=used, range=[COLOURS[name] for name in used])
    legend = alt.Legend(columns=legend_columns(used))
    ends = known[[value, "defined"] if value == "executed" else [value]]
    x, reach = Axis(title, log=10), (0.9 * float(ends.min().min()), 1.1 * float(ends.max().max()))
    across = x.scale(reach)
    axis = alt.Axis(labels=labelled, ticks=False, labelLimit=420, grid=True)
    base = alt.Chart(known).encode(alt.Y("layer:N", title=None, sort=names, axis=axis))
    layers: list[Any] = [
        base.mark_point(filled=True, size=46, opacity=0.85).encode(
            alt.X(f"{value}:Q", title=title, scale=across, axis=x.axis(reach)),
            color=alt.Color("algorithm:N", scale=scale, legend=legend),
            tooltip=["layer", "algorithm", f"{value}:Q"],
        )
    ]
    if value == "executed":
        line = base.mark_tick(color=INK, thickness=1.6, height=ROW - 8)
        layers.insert(0, line.encode(alt.X("defined:Q", scale=across)))
    return alt.layer(*layers).properties(width=PANEL, height=ROW * len(names))
