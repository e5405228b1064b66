"""Memory layouts: time of a model's convolutions and steps in each, and of what is moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig

from lab.benchmarks import harness
from lab.benchmarks.present import Drawn, Row, ends, fastest, medians_of, ranged
from lab.benchmarks.request import BenchRequest
from lab.convolution import Pass
from lab.device.convolution import announced, described, distinct_convolutions, shapes_of
from lab.device.formats import (
    MemoryLayout,
    MixedLayouts,
    Moves,
    calls_in,
    implementation,
    layouts_for,
    moves,
)
from lab.distributed.world import World
from lab.draw.chart import BLACK, GREY, SKY, alt
from lab.draw.plots import bars
from lab.settings.names import class_name
from lab.training.assemble import assembled
from lab.training.trainer import AUTOCAST

WARMUP = 3  # steps before all others
NUM_LOGGED = 5  # calls whose reorders and copies are timed; being logged slows all the rest
MIXED = "mixed"
TRANSFORM = {"_target_": f"{MixedLayouts.__module__}.{MixedLayouts.__name__}"}
STEPS: dict[str, dict[str, Any]] = {  # settings of a run
    MemoryLayout.NCHW: {},
    MemoryLayout.NHWC: {"channels_last": True},
    MIXED: {"transform": TRANSFORM},
}
MS = 1e3
HEADER = [
    *("layer", "x", "pass", "layout", "time (ms)", "to NCHW", "reorders", "(ms)", "copies"),
    *("(ms)", "both (%)", "from > to", "ran"),
]
MOST_LAYERS = 13  # in a figure: those that take longest
PARTS = {"reorders": BLACK, "copies by torch": GREY, "the rest": SKY}


@dataclass
class Times:
    """A computation in one layout: moves of NUM_LOGGED calls, and seconds of each of the others.

    Attributes:
        about: of one pass of a layer: layer, shape, pass; count: layers of the model with these
            shapes; is_needed: steps compute it: all but backward data of the first layer; ran:
            which of its implementations oneDNN chose; None: it was not asked.
    """

    layout: str
    logs: list[Moves]
    call_s: list[float]
    about: dict[str, Any] = field(default_factory=dict)


@harness.on_one_rank
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    """Measure layers, then steps, in all layouts in turns."""
    config, num_rounds = request.config, request.own["rounds"]
    config.steps, config.optim.lr = WARMUP + NUM_LOGGED + num_rounds, 0.0  # 0 keeps the weights
    layers = _layers(config, world.device, num_rounds)
    return {
        "rows": [row for layer in layers for row in _rows(layer)],
        "sums": [
            *(sums(each[0].about["layer"], each) for each in layers),
            sums("all", sum(layers, [])),
        ],
        "steps": _compared(_steps(config, world, num_rounds)),
        "model": class_name(config.model["_target_"]),
        "batch_size": config.batch_size,
        "num_rounds": num_rounds,
        "device": world.device.type,
    }


def sums(name: str, operations: Sequence[Times]) -> dict[str, Any]:
    """Add up what a step needs, round by round, times the number of layers of the same shapes."""
    needed = [each for each in operations if each.about["is_needed"]]
    totals = []
    for layout in dict.fromkeys(each.layout for each in needed):
        of_layout = [each for each in needed if each.layout == layout]
        counted = [each.about["count"] * np.array(each.call_s) for each in of_layout]
        logs = [_joined(of_layout, number) for number in range(NUM_LOGGED)]
        totals.append(Times(layout, logs, np.sum(counted, axis=0).tolist()))
    return {"layer": name, "layouts": _compared(totals)}


def _joined(operations: Sequence[Times], number: int) -> Moves:
    """Return what all operations move in their logged call of this number."""
    moved = [each.logs[number] for each in operations for _ in range(each.about["count"])]
    return Moves(
        tuple(reorder for each in moved for reorder in each.reorders),
        tuple(seconds for each in moved for seconds in each.copy_s),
    )


def _layers(config: DictConfig, device: torch.device, num_rounds: int) -> list[list[Times]]:
    """Measure the passes of each distinct convolution."""
    dtype, on_gpu = AUTOCAST.get(config.precision, torch.float32), device.type == "cuda"

    def seconds(call: harness.Call) -> float:
        return harness.per_call(call, harness.NUM_CALLS if on_gpu else 1, device).call_s

    layers = []
    for place, problem, names in announced(distinct_convolutions(config)):
        tensors = problem.draw(device, dtype)
        calls = [
            (layout, which, call)
            for layout in layouts_for(device, dtype)
            for which, call in calls_in(layout, problem, *tensors, x_is_data=place == 0).items()
        ]
        ran = [None if on_gpu else implementation(call) for *_, call in calls]
        times = _in_turns(
            [(layout, partial(seconds, c), partial(moves, c, device)) for layout, _, c in calls],
            num_rounds,
        )
        about = {"layer": names[0], "shape": described(problem), "count": len(names)}
        for one, (_, which, _), by in zip(times, calls, ran, strict=True):
            is_needed = place > 0 or which != Pass.BACKWARD_DATA
            one.about = {**about, "pass": str(which), "is_needed": is_needed, "ran": by}
        layers.append(times)
    return layers


def _steps(config: DictConfig, world: World, num_rounds: int) -> list[Times]:
    """Measure whole steps."""
    print("steps", flush=True)
    with ExitStack() as stack:
        candidates = []
        for layout, settings in STEPS.items():
            changed = deepcopy(config)
            changed.update(settings)
            part = stack.enter_context(assembled(changed, world))
            step = partial(next, part.trainer.steps())
            for _ in range(WARMUP):
                step()
            take = partial(harness.seconds_of, step, world.device)
            candidates.append((layout, take, partial(moves, step, world.device)))
        return _in_turns(candidates, num_rounds)


def _in_turns(
    candidates: Sequence[tuple[str, Callable[[], float], Callable[[], Moves]]], num_rounds: int
) -> list[Times]:
    """Log all candidates in turns, then time them in turns.

    Args:
        candidates: the layout; a call that computes and returns its seconds; and one that computes
            once, and returns what it moved.
    """
    layouts, takes, logs = zip(*candidates, strict=True)
    logged = harness.take_turns(logs, NUM_LOGGED, shows=False)
    return list(map(Times, layouts, logged, harness.take_turns(takes, num_rounds)))


def _rows(operations: Sequence[Times]) -> list[dict[str, Any]]:
    """Return a row for each pass and layout of a layer."""
    rows = []
    for which in Pass:
        of_pass = [each for each in operations if each.about["pass"] == which]
        rows += [one.about | row for one, row in zip(of_pass, _compared(of_pass), strict=True)]
    return rows


def _compared(all_times: Sequence[Times]) -> list[dict[str, Any]]:
    """Return time, ratio to the first of them, which is NCHW, and moves of each."""
    return [
        {
            "layout": str(each.layout),
            "time_s": harness.level(each.call_s),
            "ratio": harness.ratio(each.call_s, all_times[0].call_s),
            "reorder_s": median(log.reorder_s for log in each.logs),
            "reorders": dict(Counter(formats for formats, _ in each.logs[-1].reorders)),
            "copy_s": median(sum(log.copy_s) for log in each.logs),
            "num_copies": len(each.logs[-1].copy_s),
        }
        for each in all_times
    ]


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a line for each layer, pass and layout, for sums over layers, and for steps."""
    *_, whole = result["sums"]
    return [
        HEADER,
        *map(_layer, result["rows"]),
        *(_line(["sum", "", "all"], row) for row in whole["layouts"]),
        *(_line(["step", "", ""], row) for row in result["steps"]),
    ]


def _layer(row: dict[str, Any]) -> list[str]:
    formats = [f"{n}*{each}" if n > 1 else each for each, n in row["reorders"].items()]
    first = [row["layer"], str(row["count"]), row["pass"]]
    return [*_line(first, row)[:-2], " ".join(formats), row["ran"] or ""]


def _line(first: list[str], row: dict[str, Any]) -> list[str]:
    share = (row["reorder_s"] + row["copy_s"]) / row["time_s"]["median"]
    return [
        *(*first, row["layout"], ranged(row["time_s"], MS), ranged(row["ratio"])),
        *(str(sum(row["reorders"].values())), f"{MS * row['reorder_s']:.3f}"),
        *(str(row["num_copies"]), f"{MS * row['copy_s']:.3f}", f"{100 * share:.1f}", "", ""),
    ]


def notes(result: dict[str, Any]) -> list[str]:
    reorders = (
        "reorders: from oneDNN's log; abcd: NCHW, acdb: NHWC, aBcd8b: channels in blocks of 8"
    )
    if result["device"] == "cuda":
        reorders = "reorders: cuDNN's kernels that change a layout, by name (untested on GPUs)"
    blocked = (
        "blocked: inputs and gradients as oneDNN's convolutions leave them; filters in NCHW, "
        "because torch cannot train others"
    )
    return [
        *shapes_of(result),
        f"{result['model']}, {result['batch_size']} images; x: how many layers have these shapes; "
        f"medians of {result['num_rounds']} interleaved rounds, [95 % intervals]",
        "the sum is over what a step needs, so it leaves out the first layer's backward data",
        reorders,
        *([blocked] if any(row["layout"] == "blocked" for row in result["rows"]) else []),
        "copies: by torch, from its profiler; in a layer, only those that change the layout; in a "
        "step, all of them; both (%): share of reorders and copies in the time, measured in "
        "calls other than the timed ones",
        "mixed: convolutions in NHWC, tensors between layers copied back into NCHW",
    ]


def chart(result: dict[str, Any]) -> Drawn:
    """Draw the time of layers and of steps in each layout, with the part that reorders take."""
    *layers, _ = result["sums"]
    longest = sorted(layers, key=lambda each: -each["layouts"][0]["time_s"]["median"])
    shown = [each for each in layers if each in longest[:MOST_LAYERS]]
    counts = {row["layer"]: row["count"] for row in result["rows"]}
    of_layers = [
        _parts(each["layer"] + (f" ({n}x)" if (n := counts[each["layer"]]) > 1 else ""), rows)
        for each in shown
        for rows in [each["layouts"]]
    ]
    drawn = [
        bars(_parts("step", result["steps"]), "ms per whole step", PARTS),
        bars(pd.concat(of_layers), "ms per step", PARTS),
    ]
    body = alt.vconcat(*(body for body, _ in drawn)).resolve_scale(color="shared")
    plain, *others = result["steps"]
    steps = f"Steps of {result['model']} with {result['batch_size']} images"
    ratios = {row["layout"]: row["ratio"] for row in others}
    message = f"{steps}: {fastest(ratios, plain['layout'])}"
    sample = [
        f"{medians_of(result)}, 95 % intervals",
        "a layer: forward and backward; reorder and copy times are from other calls",
    ]
    if len(shown) < len(layers):
        sample.append(f"the {len(shown)} of {len(layers)} shapes that take longest")
    return message, sample, (body, max(width for _, width in drawn))


def _parts(name: str, rows: list[Row]) -> Any:
    """Return a bar for each layout: its reorders and copies, and the rest of its time."""
    lines: list[Row] = []
    for row in rows:
        time, moved = ends(row["time_s"], MS), (MS * row["reorder_s"], MS * row["copy_s"])
        values = (*moved, max(0.0, time["value"] - sum(moved)))
        interval = {"low": time["low"], "high": time["high"]}
        lines += [
            {"name": f"{name} {row['layout']}", "part": part, "value": value, **interval}
            for part, value in zip(PARTS, values, strict=True)
        ]
    return pd.DataFrame(lines)
