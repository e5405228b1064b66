"""Measure step times of two or more sets of settings, some steps of each in every round.

A turn's first step does not count: it begins on a device that has nothing to do, so the host is not
ahead of it as it is in training, and finds what the others have left in the caches.

Starts of the same comparison differ by more than the rounds of one, so ranks start anew
several times, and the intervals are those between starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig

from lab.benchmarks import harness, present
from lab.benchmarks.request import BenchRequest
from lab.distributed.world import World
from lab.draw.chart import looks_of
from lab.draw.plots import dots
from lab.measure.statistics import InterleavedSteps, least_warmup, round_means
from lab.settings.config import ConfigError
from lab.training.assemble import Assembly, assembled
from lab.training.graph import leave_default_stream
from lab.training.trainer import Trainer

BASELINE, REFERENCE = "none", "ddp"  # without communication, and torch's own
# Whether each quantity that starts are averaged over is a ratio above 0.
POSITIVE = {
    **{"ratio": True, "wall_ratio": True},
    **{"exposed_exchange_s": False, "exposed_to_ddp": False},
}
TURN = 10  # steps of a turn, where there are enough for several
ALONE = (
    "1 rank sends nothing: exact exchanges return at once, lossy ones only encode and decode, "
    "and ddp copies gradients into buckets and calls its library"
)
WALL = "by wall clock: all steps and what the host does between them, including stalls"


@harness.on_ranks
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    """Measure all variants in one start. Turns have whole rounds, of as many steps as strategies'.

    The order in which candidates are built and warmed up is drawn by `order_seed`.
    """
    worlds, seed = harness.worlds_of(request, world), request.own["order_seed"]
    configs = [variant.config for variant in request.variants]
    parts, turns, turn_s, step_s = in_order(configs, worlds, seed)
    labels = [variant.label for variant in request.variants]
    rows = compare(*(dict(zip(labels, each, strict=True)) for each in (step_s, turn_s)))
    for row, part in zip(rows, parts, strict=True):
        row["num_parameters"] = part.sizes["num_parameters"]
        row["comm_settings"] = part.trainer.world.comm.settings
    return {
        "rows": rows,
        "num_pairs": step_s.shape[1],
        "steps_per_round": turns.every,
        "steps_per_turn": turns.size,
        "order_seed": seed,
    }


def in_order(
    configs: Sequence[DictConfig], worlds: Sequence[World], seed: int, shows: bool = True
) -> tuple[list[Assembly], InterleavedSteps, np.ndarray, np.ndarray]:
    """Build candidates in an order drawn by `seed`, and train them in turns.

    Returns:
        The parts, the turns and the seconds, as `in_turns` returns them, in the order given.
    """
    drawn = harness.places(len(configs), seed)
    if any(config.graph for config in configs):
        leave_default_stream(worlds[0].device)
    with ExitStack() as stack:
        parts = [stack.enter_context(assembled(configs[at], worlds[at])) for at in drawn]
        turns, turn_s, step_s = in_turns(parts, worlds[0], shows)
    back = np.argsort(drawn)
    return [parts[at] for at in back], turns, turn_s[back], step_s[back]


def combine(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the results of several starts; see `lab.benchmarks.harness.across_starts`."""
    found = harness.joined_starts(starts, POSITIVE)
    for place, row in enumerate(found["rows"]):
        row["step_s"] = harness.middle([s["rows"][place]["step_s"]["median"] for s in starts])
    return found


def compare(times: dict[str, np.ndarray], walls: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Compute a row for each label: its ratios to the last, and its exposed communication.

    Args:
        times: a step's seconds in each turn, by label; equal positions ran one after the other.
            Exposed communication is a step's time less that of "none", if it is among the labels,
            and is compared with that of "ddp".
        walls: the same with what the host does until the next step. Of these all count, as a
            user waits for slow ones too: the ratio is that of sums.
    """
    *_, last = times
    return [
        {
            "name": label,
            "step_s": harness.middle(seconds),
            "ratio": None if label == last else harness.ratio(seconds, times[last]),
            "wall_ratio": None if label == last else harness.mean_ratio(walls[label], walls[last]),
            **_exposed(label, times),
        }
        for label, seconds in times.items()
    ]


def _exposed(label: str, times: dict[str, np.ndarray]) -> dict[str, Any]:
    exposed: dict[str, Any] = {"exposed_exchange_s": None, "exposed_to_ddp": None}
    if BASELINE not in times or label == BASELINE:
        return exposed
    step_s, baseline = times[label], times[BASELINE]
    exposed["exposed_exchange_s"] = harness.difference(step_s, baseline)
    if REFERENCE in times and label != REFERENCE:
        to_ddp = harness.interval(
            lambda a, c, d: (a - c) / (d - c), step_s, baseline, times[REFERENCE]
        )
        exposed["exposed_to_ddp"] = to_ddp
    return exposed


def in_turns(
    parts: list[Assembly], world: World, shows: bool = True
) -> tuple[InterleavedSteps, np.ndarray, np.ndarray]:
    """Train all parts, first each alone until it is warm, then in turns that all ranks begin.

    Args:
        shows: draw a bar of progress, on rank 0.

    Returns:
        The turns. Seconds of a step in each, by the slowest rank, [parts, turns]: with what the
        host does until the next step, and alone.

    Raises:
        ConfigError: too few steps.
    """
    trainers = [part.trainer for part in parts]
    loops = [trainer.steps() for trainer in trainers]
    for trainer, loop in zip(trainers, loops, strict=True):
        warm_up(trainer, loop)
    num_turns, turns = _planned(trainers)
    for trainer, loop in zip(trainers, loops, strict=True):
        _advance(loop, turns.num_warmup - trainer.progress.step)
        trainer.end_turn()
    align, num_counted = harness.aligner(world), turns.size - turns.every

    def turn_s(trainer: Trainer, loop: Iterator[object]) -> float:
        align()
        _advance(loop, turns.every)
        began = time.perf_counter()
        _advance(loop, num_counted)
        took = (time.perf_counter() - began) / num_counted
        trainer.end_turn()
        return took

    takes = [partial(turn_s, *each) for each in zip(trainers, loops, strict=True)]
    taken = harness.take_turns(takes, num_turns, shows and world.rank == 0)
    steps = torch.from_numpy(np.stack([each.clock.step_seconds() for each in trainers]))
    counted = turns.steady_mask(steps.shape[1])
    of_steps = [
        turns.seconds(round_means(each[:, counted], 0, turns.every))
        for each in world.gather(steps).transpose(0, 1).numpy()
    ]
    return turns, harness.of_slowest(taken, world), np.array(of_steps)


def warm_up(trainer: Trainer, loop: Iterator[object]) -> None:
    """Train until the warm-up is over, and steps are made as all later ones will be."""
    progress, warmup = trainer.progress, least_warmup(trainer.config.warmup_steps)
    while progress.step < warmup or trainer.settled_at is None:
        if next(loop, None) is None:
            raise ConfigError(
                f"steps={trainer.total_steps}: too few: strategy={trainer.config.strategy} is not "
                f"measured in the first {warmup} steps, nor while it tries other exchanges"
            )


def _planned(trainers: Sequence[Trainer]) -> tuple[int, InterleavedSteps]:
    """Return the number of turns, and how all trainers, which are warm, spend their steps.

    There are as many turns as intervals need, if that leaves two rounds for each: one that counts.
    """
    every = math.lcm(*(trainer.sync.every for trainer in trainers))
    alone = every * math.ceil(max(trainer.progress.step for trainer in trainers) / every)
    steps = min(trainer.total_steps for trainer in trainers)
    num_rounds = (steps - alone) // every
    if num_rounds < 2:
        raise ConfigError(
            f"steps={steps}: too few: {alone} steps are warm-up, and at least "
            f"{2 * every} more are needed"
        )
    size = every * min(max(2, num_rounds // harness.ENOUGH_ROUNDS), max(2, TURN // every))
    return (steps - alone) // size, InterleavedSteps(alone, size, every)


def _advance(loop: Iterator[object], num_steps: int) -> None:
    for _ in islice(loop, num_steps):
        pass


def columns(result: dict[str, Any]) -> dict[str, present.Column]:
    rows = result["rows"]
    found = {
        "": present.text("name"),
        **present.medians("step (ms)", "step_s", 1e3, 2),
        f"ratio to {rows[-1]['name']}": present.intervals("ratio", reference="1"),
    }
    if any(row.get("wall_ratio") for row in rows):
        found["by wall clock"] = present.intervals("wall_ratio", reference="1")
    if any(row["exposed_exchange_s"] for row in rows):
        found["exposed exchange (ms)"] = present.intervals("exposed_exchange_s", 1e3)
        found["of ddp's"] = present.intervals("exposed_to_ddp")
    return found


def notes(result: dict[str, Any]) -> list[str]:
    every, size = result["steps_per_round"], result.get("steps_per_turn")
    first = "first" if every == 1 else f"first {every}"
    turn = f"a round has a turn of {size} steps for each row, not counting the {first}"
    if size is None:  # a result of before there were turns
        steps = "a step" if every == 1 else f"{every} steps"
        turn = f"a round has {steps} of each row"
    alone = [ALONE] if result["world_size"] == 1 else []
    wall = any(row.get("wall_ratio") for row in result["rows"])
    return [
        f"medians of {result['num_pairs']} rounds {present.on_ranks_of(result)}; {turn}; a step's "
        "time is that of its slowest rank",
        *alone,
        *([WALL] if wall else []),
        f"[95 % intervals] {present.intervals_of(result)}; exposed exchange: step - step with "
        "strategy=none, in the same run",
    ]


def chart(result: dict[str, Any]) -> present.Drawn:
    """Draw step times and ratios, and exposed communication if it is known, in panels."""
    rows = result["rows"]
    last = rows[-1]["name"]
    panels: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {
        "step time (ms), ± mad": lambda row: _around(row["step_s"]),
        f"step time / that of {last}": lambda row: present.ends(row["ratio"]),
        "exposed exchange (ms)": lambda row: present.ends(row["exposed_exchange_s"], 1e3),
        "exposed exchange / ddp's": lambda row: present.ends(row["exposed_to_ddp"]),
    }
    hollow = result["emulation"] != "none"
    data: Any = pd.DataFrame(
        {"name": row["name"], "panel": panel, "hollow": hollow, **ends_of(row)}
        for panel, ends_of in panels.items()
        for row in rows
    )
    known = data.groupby("panel")["value"].transform("count") > 0
    looks = looks_of(row["name"] for row in rows)
    others = {row["name"]: row["ratio"] for row in rows[:-1] if row["name"] != BASELINE}
    starts = len(result.get("starts") or [0])
    message = (
        present.fastest(others, last, "step time", starts)
        if others
        else f"Step times on {present.ranks_of(result)}"
    )
    between = f" over {starts} starts" if starts > 1 else ""
    sample = f"medians of {result['num_pairs']} interleaved rounds, 95 % intervals{between}"
    drawn = dots(
        data[known],
        {row["name"]: looks[row["name"]] for row in rows},
        {panel: 1.0 for panel in panels if "/" in panel},
    )
    return message, [f"{present.machine(result)} · {sample}"], drawn


def _around(step_s: dict[str, float]) -> dict[str, float]:
    median, mad = 1e3 * step_s["median"], 1e3 * step_s["mad"]
    return {"value": median, "low": median - mad, "high": median + mad}
