"""Memory layouts: time of a model's convolutions and steps in each, and of what is moved."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from lab.benchmarks.harness import NUM_CALLS, per_call
from lab.benchmarks.request import Request
from lab.convolution.problem import Pass, Problem
from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.layers.layouts import Layout, MixedLayouts, Moves, calls_in, layouts_for, moves
from lab.measure.onednn import implementations
from lab.measure.turns import order
from lab.settings.names import class_name
from lab.training.assemble import join
from lab.training.dry import assembled
from lab.training.identity import surroundings
from lab.training.trainer import AUTOCAST

Call = Callable[[], object]

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
class Times:
    """Seconds of each timed call of a computation in one layout, and moves of NUM_LOGGED others."""

    layout: str
    logs: list[Moves] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)


@dataclass
class Candidate:
    """A computation that takes turns with others.

    Attributes:
        take: computes it once or several times, and returns the seconds of one.
        log: computes it once, and returns what it moved.
    """

    times: Times
    take: Callable[[], float]
    log: Callable[[], Moves]


@dataclass(frozen=True)
class Operation:
    """One pass of a layer in one layout.

    Attributes:
        count: layers of the model with these shapes.
        is_needed: steps compute it: all but backward data of the first layer.
        ran: which of its implementations oneDNN chose; None: it was not asked.
    """

    times: Times
    layer: str
    shape: str
    count: int
    which: Pass
    is_needed: bool
    ran: str | None


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
        layers = _layers(config, world.device, num_rounds)
        steps = _steps(config, world, num_rounds)
        return {
            "rows": [row for layer in layers for row in _rows(layer)],
            "sums": [*(sums(each[0].layer, each) for each in layers), sums("all", sum(layers, []))],
            "steps": _compared(steps),
            "model": class_name(config.model["_target_"]),
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
    for layout in dict.fromkeys(each.times.layout for each in needed):
        of_layout = [each for each in needed if each.times.layout == layout]
        call_s = np.sum([each.count * np.array(each.times.call_s) for each in of_layout], axis=0)
        logs = [_joined(of_layout, number) for number in range(NUM_LOGGED)]
        totals.append(Times(layout, logs, call_s.tolist()))
    return {"layer": name, "layouts": _compared(totals)}


def _joined(operations: Sequence[Operation], number: int) -> Moves:
    """Return what all operations move in their logged call of this number."""
    moved = [each.times.logs[number] for each in operations for _ in range(each.count)]
    return Moves(
        tuple(reorder for each in moved for reorder in each.reorders),
        tuple(seconds for each in moved for seconds in each.copy_s),
    )


def _layers(config: DictConfig, device: torch.device, num_rounds: int) -> list[list[Operation]]:
    """Measure the passes of each distinct convolution."""
    problems = distinct_convolutions(config)
    dtype = AUTOCAST.get(config.precision, torch.float32)
    layers = []
    for place, (problem, names) in enumerate(problems.items()):
        print(f"[{place + 1}/{len(problems)}] {names[0]}: {described(problem)}", flush=True)
        candidates, layer = [], []
        for layout, which, call in _calls(problem, place == 0, dtype, device):
            is_needed = place > 0 or which != Pass.BACKWARD_DATA
            one = _candidate(layout, call, device)
            named = names[0], described(problem), len(names), which, is_needed
            layer.append(Operation(one.times, *named, _implementation(call, device)))
            candidates.append(one)
        _take_turns(candidates, num_rounds)
        layers.append(layer)
    return layers


def _calls(
    problem: Problem, is_first: bool, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Layout, Pass, Call]]:
    """Yield a call of each pass in each layout, on random tensors."""
    make = partial(torch.randn, device=device, dtype=dtype)
    x = make(problem.batch, problem.channels, *problem.size)
    w = make(problem.filters, problem.channels // problem.groups, *problem.kernel)
    dy = make(problem.batch, problem.filters, *problem.out_size)
    for layout in layouts_for(device, dtype):
        for which, call in calls_in(layout, problem, x, w, dy, x_is_data=is_first).items():
            yield layout, which, call


def _candidate(layout: Layout, call: Call, device: torch.device) -> Candidate:
    num_calls = NUM_CALLS if device.type == "cuda" else 1
    return Candidate(
        Times(layout),
        lambda: per_call(call, num_calls, device).call_s,
        partial(moves, call, device),
    )


def _implementation(call: Call, device: torch.device) -> str | None:
    ran = implementations(call) if device.type == "cpu" else []
    return ran[-1] if ran else None


def _steps(config: DictConfig, world: World, num_rounds: int) -> list[Times]:
    """Measure whole steps."""
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
            log = partial(moves, step, world.device)
            candidates.append(Candidate(Times(layout), take, log))
        _take_turns(candidates, num_rounds)
    return [each.times for each in candidates]


def _step_seconds(step: Call, device: torch.device) -> float:
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _take_turns(candidates: Sequence[Candidate], num_rounds: int) -> None:
    """Log all candidates in turns, then time them in turns."""
    for number in range(NUM_LOGGED):
        for index in order(len(candidates), number):
            candidates[index].times.logs.append(candidates[index].log())
    for number in interleave.progress(range(num_rounds), 0):
        for index in order(len(candidates), number):
            candidates[index].times.call_s.append(candidates[index].take())


def _rows(operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """Return a row for each pass and layout of a layer."""
    rows = []
    for which in Pass:
        of_pass = [each for each in operations if each.which == which]
        for one, compared in zip(of_pass, _compared([each.times for each in of_pass]), strict=True):
            named = {"layer": one.layer, "shape": one.shape, "count": one.count}
            named |= {"pass": str(which), "is_needed": one.is_needed, "ran": one.ran}
            rows.append(named | compared)
    return rows


def _compared(all_times: Sequence[Times]) -> list[dict[str, Any]]:
    """Return time, ratio to the first of them, which is NCHW, and moves of each."""
    return [
        {
            "layout": str(each.layout),
            "time_s": interleave.interval(lambda seconds: seconds, each.call_s),
            "ratio": interleave.ratio(each.call_s, all_times[0].call_s),
            "reorder_s": median(log.reorder_s for log in each.logs),
            "reorders": dict(
                Counter(f"{one.source}>{one.target}" for one in each.logs[-1].reorders)
            ),
            "copy_s": median(sum(log.copy_s) for log in each.logs),
            "num_copies": len(each.logs[-1].copy_s),
        }
        for each in all_times
    ]
