"""Memory layouts: time of a model's convolutions and steps in each, and of what is moved."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from lab.benchmarks import interleave
from lab.benchmarks.convolution import described, distinct_convolutions
from lab.benchmarks.request import Request
from lab.benchmarks.timing import NUM_CALLS, per_call
from lab.convolution.problem import Pass, Problem
from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.layers.layouts import Layout, MixedLayouts, Moves, calls_in, layouts_for, moves
from lab.measure.onednn import implementations
from lab.training.assemble import join
from lab.training.dry import assembled
from lab.training.surroundings import surroundings
from lab.training.trainer import AUTOCAST

WARMUP = 3  # steps before all others
NUM_LOGGED = 5  # calls whose reorders and copies are timed; being logged slows all the rest
MIXED = "mixed"
TRANSFORM = {"_target_": f"{MixedLayouts.__module__}.{MixedLayouts.__name__}"}
STEPS: dict[str, dict[str, Any]] = {  # settings of a run
    Layout.NCHW: {},
    Layout.NHWC: {"channels_last": True},
    MIXED: {"transform": TRANSFORM},
}


@dataclass
class Candidate:
    """A computation in one layout, its times, and what it moves.

    Attributes:
        take: computes it once or several times, and returns the seconds of one.
        logs: what each of NUM_LOGGED calls moves.
    """

    layout: str
    take: Callable[[], float]
    logs: list[Moves]
    call_s: list[float] = field(default_factory=list)


@dataclass
class Operation(Candidate):
    """One pass of a layer.

    Attributes:
        count: layers of the model with these shapes.
        is_needed: steps compute it: all but backward data of the first layer.
        ran: which of its implementations oneDNN chose; None: it was not asked.
    """

    layer: str = ""
    shape: str = ""
    count: int = 1
    which: Pass = Pass.FORWARD
    is_needed: bool = True
    ran: str | None = None


def measure(request: Request) -> dict[str, Any]:
    """Measure layers, then steps, in all layouts in turns.

    Raises:
        ConfigError: the model has no convolution, or a setting does not fit the data and devices.
    """
    config, num_rounds = request.only_config, request.own["rounds"]
    config.steps, config.optim.lr = WARMUP + NUM_LOGGED + num_rounds, 0.0  # 0 keeps the weights
    try:
        world = join(config)
        torch.set_num_threads(request.own["threads"])
        layers = _layers(config, world, num_rounds)
        steps = _steps(config, world, num_rounds)
        return {
            "rows": [row for layer in layers for row in _rows(layer)],
            "sums": [*(sums(each[0].layer, each) for each in layers), sums("all", sum(layers, []))],
            "steps": _compared(steps),
            "model": config.model["_target_"].rpartition(".")[2],
            "batch_size": config.batch_size,
            "num_rounds": num_rounds,
            "device": world.device.type,
            **surroundings(world, config),
        }
    finally:
        worlds.stop()


def sums(name: str, operations: Sequence[Operation]) -> dict[str, Any]:
    """Add up what a step needs, round by round, times the number of layers of the same shapes."""
    needed = [each for each in operations if each.is_needed]
    totals = []
    for layout in dict.fromkeys(each.layout for each in needed):
        of_layout = [each for each in needed if each.layout == layout]
        call_s = np.sum([each.count * np.array(each.call_s) for each in of_layout], axis=0)
        logs = [_joined(of_layout, number) for number in range(NUM_LOGGED)]
        totals.append(Candidate(layout, lambda: 0.0, logs, call_s.tolist()))
    return {"layer": name, "layouts": _compared(totals)}


def _joined(operations: Sequence[Operation], number: int) -> Moves:
    """Return what all operations move in their logged call of this number."""
    moved = [each.logs[number] for each in operations for _ in range(each.count)]
    return Moves(
        tuple(reorder for each in moved for reorder in each.reorders),
        tuple(seconds for each in moved for seconds in each.copy_s),
    )


def _layers(config: DictConfig, world: World, num_rounds: int) -> list[list[Operation]]:
    problems = distinct_convolutions(config)
    layers = []
    for place, (problem, names) in enumerate(problems.items()):
        print(f"[{place + 1}/{len(problems)}] {names[0]}: {described(problem)}", flush=True)
        layer = _operations(problem, names, place == 0, config, world.device)
        _take_turns(layer, num_rounds)
        layers.append(layer)
    return layers


def _operations(
    problem: Problem, names: list[str], is_first: bool, config: DictConfig, device: torch.device
) -> list[Operation]:
    """Return all passes in all layouts, warmed up, with what they move."""
    dtype = AUTOCAST.get(config.precision, torch.float32)
    make = partial(torch.randn, device=device, dtype=dtype)
    x = make(problem.batch, problem.channels, *problem.size)
    w = make(problem.filters, problem.channels // problem.groups, *problem.kernel)
    dy = make(problem.batch, problem.filters, *problem.out_size)
    num_calls = NUM_CALLS if device.type == "cuda" else 1
    found = []
    for layout in layouts_for(device, dtype):
        for which, call in calls_in(layout, problem, x, w, dy, x_is_data=is_first).items():
            ran = implementations(call) if device.type == "cpu" else []
            found.append(
                Operation(
                    *(layout, partial(_seconds, call, num_calls, device), _logs(call, device)),
                    **{"layer": names[0], "shape": described(problem), "count": len(names)},
                    **{"which": which, "ran": ran[-1] if ran else None},
                    is_needed=not (is_first and which == Pass.BACKWARD_DATA),
                )
            )
    return found


def _seconds(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    return per_call(call, num_calls, device).call_s


def _steps(config: DictConfig, world: World, num_rounds: int) -> list[Candidate]:
    print("steps", flush=True)
    with ExitStack() as stack:
        candidates = []
        for layout, settings in STEPS.items():
            changed = deepcopy(config)
            for key, value in settings.items():
                changed[key] = value
            part = stack.enter_context(assembled(changed, world))
            step = partial(next, part.trainer.steps())
            for _ in range(WARMUP):
                step()
            take = partial(_step_seconds, step, world.device)
            candidates.append(Candidate(layout, take, _logs(step, world.device)))
        _take_turns(candidates, num_rounds)
    return candidates


def _step_seconds(step: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _logs(call: Callable[[], object], device: torch.device) -> list[Moves]:
    return [moves(call, device) for _ in range(NUM_LOGGED)]


def _take_turns(candidates: Sequence[Candidate], num_rounds: int) -> None:
    for number in interleave.progress(range(num_rounds), 0):
        for index in interleave.order(len(candidates), number):
            one = candidates[index]
            one.call_s.append(one.take())


def _rows(operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """Return a row for each pass and layout of a layer."""
    rows = []
    for which in Pass:
        of_pass = [each for each in operations if each.which == which]
        for one, compared in zip(of_pass, _compared(of_pass), strict=True):
            named = {"layer": one.layer, "shape": one.shape, "count": one.count}
            named |= {"pass": str(which), "is_needed": one.is_needed, "ran": one.ran}
            rows.append(named | compared)
    return rows


def _compared(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Return time, ratio to the first candidate, which is NCHW, and moves of each."""
    return [
        {
            "layout": str(one.layout),
            "time_s": interleave.interval(lambda seconds: seconds, one.call_s),
            "ratio": interleave.ratio(one.call_s, candidates[0].call_s),
            "reorder_s": median(log.reorder_s for log in one.logs),
            "reorders": dict(
                Counter(f"{each.source}>{each.target}" for each in one.logs[-1].reorders)
            ),
            "copy_s": median(sum(log.copy_s) for log in one.logs),
            "num_copies": len(one.logs[-1].copy_s),
        }
        for one in candidates
    ]
