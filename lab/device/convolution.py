"""Convolution algorithms on the layers of a model: time, operations, workspace and error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import altair as alt
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from lab.benchmarks import interleave
from lab.benchmarks.harness import NUM_CALLS, per_call
from lab.benchmarks.present import about, ranged
from lab.benchmarks.request import Request
from lab.convolution.algorithms import ALGORITHMS, LIBRARY
from lab.convolution.layer import call_of, convolutions_of
from lab.convolution.problem import Algorithm, Pass, Problem
from lab.device.alone import implementation, on_one_rank, threaded
from lab.draw.chart import INK, LABEL_PX, LETTER, Chart
from lab.draw.looks import BLACK, BLUE, BROWN, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from lab.draw.plots import GAP, Axis, legend_columns
from lab.problem.build import blueprint
from lab.settings.config import ConfigError
from lab.settings.names import class_name
from lab.training.recording import surroundings

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


@dataclass
class Operation:
    """One pass of one layer by one algorithm, and its times.

    Attributes:
        error: largest difference from float64, relative to the largest value.
        ran: of the library: which of its own implementations.
    """

    algorithm: Algorithm
    which: Pass
    error: float
    ran: str | None
    call_s: list[float] = field(default_factory=list)

    def wants_turn(self) -> bool:
        return len(self.call_s) < interleave.ENOUGH_ROUNDS or sum(self.call_s) < BUDGET_S


def measure(request: Request) -> dict[str, Any]:
    """Measure every algorithm on every convolution of the model, all passes.

    Raises:
        ConfigError: the model has no convolution, or an algorithm is unknown.
    """
    config = request.only_config
    chosen = _algorithms(request.own["algorithm"])
    with on_one_rank(config, request.own["threads"]) as world:
        layers = distinct_convolutions(config)
        rows = []
        for place, (problem, names) in enumerate(layers.items()):
            title = f"[{place + 1}/{len(layers)}] {names[0]}: {described(problem)}"
            print(title, flush=True)
            measured = _measured(problem, names, chosen, world.device, request.own["rounds"])
            rows += [{**row, "is_first": place == 0} for row in measured]
        return {
            "rows": rows,
            "sums": sums(rows),
            "model": class_name(config.model["_target_"]),
            "batch_size": config.batch_size,
            "device": world.device.type,
            **surroundings(world, config),
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
        raise ConfigError(f"model={config.model['_target_']}: has no 2-d convolution")
    layers: dict[Problem, list[str]] = {}
    for name, problem in found.items():
        layers.setdefault(problem, []).append(name)
    return layers


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


def _algorithms(names: list[str] | None) -> list[Algorithm]:
    for name in names or ():
        if name not in ALGORITHMS:
            raise ConfigError(f"algorithm={name}: allowed are {', '.join(ALGORITHMS)}")
    return [
        each for name, each in ALGORITHMS.items() if not names or name in names or each is LIBRARY
    ]


def _measured(
    problem: Problem,
    names: list[str],
    algorithms: list[Algorithm],
    device: torch.device,
    num_rounds: int,
) -> list[Row]:
    tensors = _tensors(problem, device)
    refused: Refused = {
        (algorithm, which): algorithm.refusal(problem, which)
        for algorithm in algorithms
        for which in Pass
    }
    checks = _errors(replace(problem, batch=CHECKED_BATCH), refused, device)
    operations = list[tuple[Operation, Callable[[], Tensor]]]()
    for (algorithm, which), reason in refused.items():
        if reason is None:
            call = call_of(algorithm, problem, which, *tensors)
            ran = implementation(call) if algorithm is LIBRARY else None
            operations.append((Operation(algorithm, which, checks[algorithm, which], ran), call))
    num_calls = NUM_CALLS if device.type == "cuda" else 1
    rounds = interleave.progress(range(num_rounds), 0)
    for index, _ in interleave.turns(len(operations), rounds):
        one, call = operations[index]
        if one.wants_turn():
            one.call_s.append(per_call(call, num_calls, device).call_s)
    done = {(one.algorithm, one.which): one for one, _ in operations}
    return list(_rows(problem, names, refused, done))


def _tensors(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw an input, filters, and a gradient of the output."""
    group = problem.channels // problem.groups
    return (
        torch.randn(problem.batch, problem.channels, *problem.size, device=device),
        torch.randn(problem.filters, group, *problem.kernel, device=device),
        torch.randn(problem.batch, problem.filters, *problem.out_size, device=device),
    )


def _errors(
    problem: Problem, refused: Refused, device: torch.device
) -> dict[tuple[Algorithm, Pass], float]:
    """Return each algorithm's largest error against float64, relative to the largest value."""
    tensors = _tensors(problem, device)
    wide = tuple(tensor.double() for tensor in tensors)
    errors: dict[tuple[Algorithm, Pass], float] = {}
    for which in Pass:
        true = call_of(LIBRARY, problem, which, *wide)()
        for (algorithm, of_pass), reason in refused.items():
            if of_pass == which and reason is None:
                found = call_of(algorithm, problem, which, *tensors)()
                errors[algorithm, which] = float((found - true).abs().max() / true.abs().max())
    return errors


def _rows(
    problem: Problem,
    names: list[str],
    refused: Refused,
    done: dict[tuple[Algorithm, Pass], Operation],
) -> Iterator[Row]:
    for (algorithm, which), reason in refused.items():
        one, library = done.get((algorithm, which)), done[LIBRARY, which]
        cost = algorithm.total(problem, which)
        paired = min(len(one.call_s), len(library.call_s)) if one else 0
        yield {
            "layer": names[0],
            "count": len(names),
            "shape": described(problem),
            "pass": str(which),
            "algorithm": algorithm.name,
            "refused": reason,
            "operations": problem.operations,
            "executed": cost.operations,
            "workspace_bytes": cost.workspace_bytes,
            "time_s": interleave.middle(one.call_s) if one else None,
            "num_rounds": len(one.call_s) if one else 0,
            "ratio": interleave.ratio(one.call_s[:paired], library.call_s[:paired])
            if one
            else None,
            "error": one.error if one else None,
            "implementation": one.ran if one else None,
        }


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, a line for each layer, pass and algorithm, and sums over the layers."""
    return [HEADER, *map(_line, result["rows"]), *(_sum(each) for each in result["sums"])]


def _line(row: dict[str, Any]) -> list[str]:
    first = [row["layer"], str(row["count"]), row["pass"], row["algorithm"]]
    defined = f"{G * row['operations']:.3f}"
    if row["refused"]:
        return [*first, "refused", "", "", defined, "", "", "", row["refused"]]
    times = [f"{1e3 * row['time_s'][key]:.3f}" for key in ("median", "mad")]
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
    """Explain the columns, and name the layers."""
    shapes = {row["layer"]: (row["count"], row["shape"]) for row in result["rows"]}
    best, library = (_seconds_of(result, name) for name in (BEST, LIBRARY.name))
    factors = [f"library {library / best:.2f}"]
    if any(each["algorithm"] == "gemm" for each in result["sums"]):
        factors.append(f"gemm everywhere {_seconds_of(result, 'gemm') / best:.2f}")
    return [
        *(f"{name} ({count}x): {shape}" for name, (count, shape) in shapes.items()),
        f"{result['model']}, {result['batch_size']} images; x: how many layers have these shapes",
        "executed: GFLOP with tiles, padding and transforms, as this algorithm is written here "
        "(of the library: unknown, shown as by definition); error: largest difference from float64 "
        "over the largest value",
        "sums leave out backward data of the first layer; where an algorithm refuses, the library "
        f"takes its place; times the sum of the best of each pass: {', '.join(factors)}",
    ]


def _seconds_of(result: dict[str, Any], name: str) -> float:
    return next(each["seconds"] for each in result["sums"] if each["algorithm"] == name)


def chart(result: dict[str, Any]) -> Chart:
    """Draw executed operations and times of each layer by algorithm, forward and backward."""
    rows = result["rows"]
    sizes = {row["layer"]: row["operations"] for row in rows if row["pass"] == "forward"}
    layers = sorted(sorted(sizes, key=lambda name: -sizes[name])[:MOST_LAYERS], key=[*sizes].index)
    data = pd.DataFrame(
        {
            "layer": layer,
            "algorithm": name,
            # What the library executes is not known, and is not drawn.
            "executed": None if name == LIBRARY.name else G * sum(row["executed"] for row in each),
            "defined": 3 * G * sizes[layer],
            "time": MS * sum(_seconds(row) for row in each),
        }
        for (layer, name), each in _by_layer(rows, layers)
    )
    panels = [
        _panel(data, "executed", "executed (GFLOP); line: by definition", names=layers),
        _panel(data, "time", "time (ms)", names=layers, labelled=False),
    ]
    room = LETTER * LABEL_PX * max(map(len, layers)) + 60
    share = _seconds_of(result, BEST) / _seconds_of(result, LIBRARY.name)
    message = (
        f"Convolutions of {result['model']}: the best of each pass takes {share:.2f} of the "
        "library's time"
    )
    largest = f"the {len(layers)} of {len(sizes)} shapes with the most operations"
    left_out = [] if len(layers) == len(sizes) else [largest]
    sample = [
        f"{threaded(result)}, {result['batch_size']} images",
        "forward and backward together; medians of at least six rounds in turns",
        "no dot: a pass is refused, or what the library executes is not known",
    ]
    body = alt.hconcat(*panels, spacing=GAP)
    width = int(2 * PANEL + GAP + room)
    return Chart("convolution", message, [*sample, *left_out, *about(result)], body, width)


def _by_layer(rows: list[Row], layers: list[str]) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """Yield the three passes of each layer and algorithm that computes all of them."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["layer"], row["algorithm"]), []).append(row)
    for (layer, name), each in found.items():
        if layer in layers and all(row["time_s"] for row in each):
            yield (layer, name), each


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
