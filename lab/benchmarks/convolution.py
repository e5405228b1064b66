"""Convolution algorithms on the layers of a model: time, operations, workspace and error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from lab.benchmarks import interleave
from lab.benchmarks.harness import NUM_CALLS, per_call
from lab.benchmarks.request import Request
from lab.convolution.algorithms import ALGORITHMS, LIBRARY
from lab.convolution.layer import call_of, convolutions_of
from lab.convolution.problem import Algorithm, Pass, Problem
from lab.distributed import world as worlds
from lab.measure.onednn import implementations
from lab.measure.turns import order
from lab.problem.build import blueprint
from lab.settings.config import ConfigError
from lab.settings.names import class_name
from lab.training.assemble import join
from lab.training.identity import surroundings

BUDGET_S = 3.0  # of one operation: a slow one takes part in fewer rounds, but in enough
CHECKED_BATCH = 1  # images on which errors are taken: the float64 reference is slow


@dataclass
class Operation:
    """One pass of one layer by one algorithm, and its times.

    Attributes:
        error: largest difference from float64, relative to the largest value.
        implementation: of the library: which of its own ran.
    """

    algorithm: Algorithm
    which: Pass
    error: float
    implementation: str | None
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
    try:
        world = join(config)
        torch.set_num_threads(request.own["threads"])
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
    finally:
        worlds.stop()


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
    chosen["best of each"] = [
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
) -> list[dict[str, Any]]:
    tensors = _tensors(problem, device)
    refused = {
        (algorithm, which): algorithm.refusal(problem, which)
        for algorithm in algorithms
        for which in Pass
    }
    checks = _errors(replace(problem, batch=CHECKED_BATCH), refused, device)
    operations = []
    for (algorithm, which), reason in refused.items():
        if reason is None:
            call = call_of(algorithm, problem, which, *tensors)
            ran = _implementation(call) if algorithm is LIBRARY else None
            operations.append(Operation(algorithm, which, checks[algorithm, which], ran))
    num_calls = NUM_CALLS if device.type == "cuda" else 1
    for number in interleave.progress(range(num_rounds), 0):
        for index in order(len(operations), number):
            one = operations[index]
            if one.wants_turn():
                call = call_of(one.algorithm, problem, one.which, *tensors)
                one.call_s.append(per_call(call, num_calls, device).call_s)
    return list(_rows(problem, names, refused, operations))


def _implementation(call: Callable[[], Tensor]) -> str | None:
    """Return which of its implementations the library ran; None: it does not say."""
    ran = implementations(call)
    return ran[-1] if ran else None


def _tensors(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw an input, filters, and a gradient of the output."""
    group = problem.channels // problem.groups
    return (
        torch.randn(problem.batch, problem.channels, *problem.size, device=device),
        torch.randn(problem.filters, group, *problem.kernel, device=device),
        torch.randn(problem.batch, problem.filters, *problem.out_size, device=device),
    )


def _errors(
    problem: Problem, refused: dict[tuple[Algorithm, Pass], str | None], device: torch.device
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
    refused: dict[tuple[Algorithm, Pass], str | None],
    operations: list[Operation],
) -> Iterator[dict[str, Any]]:
    done = {(each.algorithm, each.which): each for each in operations}
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
            "implementation": one.implementation if one else None,
        }
