"""Measure step times of two or more sets of settings, a step of each in every round."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from lab.benchmarks import interleave
from lab.benchmarks.request import Request
from lab.benchmarks.timing import aligner
from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.measure.statistics import least_warmup, round_means
from lab.measure.turns import order
from lab.settings.config import ConfigError
from lab.training.assemble import Assembly, assembled, join
from lab.training.identity import surroundings
from lab.training.outcome import steps_of_trials
from lab.training.trainer import Trainer

CEILING, REFERENCE = "none", "ddp"


def measure(request: Request) -> dict[str, Any] | None:
    """Measure; return the result on rank 0. Rounds have as many steps as a strategy's rounds.

    Raises:
        ConfigError: a setting does not fit the data, devices and ranks at hand.
    """
    configs = [variant.config for variant in request.variants]
    try:
        joined = [join(config) for config in configs]  # perhaps over different comms
        world = joined[0]
        with ExitStack() as stack:
            parts = [
                stack.enter_context(assembled(*each)) for each in zip(configs, joined, strict=True)
            ]
            step_s = _in_turns(parts, world)
        warmup = max(_warmup(part.trainer) for part in parts)
        every = math.lcm(*(part.trainer.sync.every for part in parts))
        times = {
            variant.label: round_means(seconds[:, warmup:], warmup, every).max(axis=0)
            for variant, seconds in zip(request.variants, step_s, strict=True)
        }
        rows = compare(times)
        for row, part in zip(rows, parts, strict=True):
            row["num_parameters"] = part.sizes["num_parameters"]
            row["comm_settings"] = part.trainer.world.comm.settings
        result = {
            "rows": rows,
            "num_pairs": len(times[request.variants[0].label]),
            "steps_per_round": every,
            "world_size": world.size,
            "backend": world.comm.backend,
            **surroundings(world, *configs),
        }
        return result if world.rank == 0 else None
    finally:
        worlds.stop()


def compare(times: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Compute a row for each label: its ratio to the last, and its exposed communication.

    Args:
        times: seconds of the timed rounds by label; equal positions ran one after the other.
            Exposed communication is a step's time less that of "none", if it is among the labels,
            and is compared with that of "ddp".
    """
    *_, last = times
    return [
        {
            "name": label,
            "step_s": interleave.middle(seconds),
            "ratio": None if label == last else interleave.ratio(seconds, times[last]),
            **_exposed(label, times),
        }
        for label, seconds in times.items()
    ]


def _exposed(label: str, times: dict[str, np.ndarray]) -> dict[str, Any]:
    if CEILING not in times or label == CEILING:
        return {"exposed_exchange_s": None, "exposed_to_ddp": None}
    step_s, ceiling = times[label], times[CEILING]
    exposed = interleave.interval(lambda a, c: a - c, step_s, ceiling)
    if REFERENCE not in times or label == REFERENCE:
        return {"exposed_exchange_s": exposed, "exposed_to_ddp": None}
    to_ddp = interleave.interval(
        lambda a, c, d: (a - c) / (d - c), step_s, ceiling, times[REFERENCE]
    )
    return {"exposed_exchange_s": exposed, "exposed_to_ddp": to_ddp}


def _warmup(trainer: Trainer) -> int:
    """Return how many first steps are left out: warm-up, and any in which others were tried.

    Raises:
        ConfigError: none is left.
    """
    config, trials = trainer.config, steps_of_trials(trainer)
    warmup = max(least_warmup(config.warmup_steps), trials)
    if warmup + trainer.sync.every > trainer.total_steps:
        raise ConfigError(
            f"steps={trainer.total_steps}: too few: strategy={config.strategy} leaves out the "
            f"first {warmup}, and tries others in {trials}"
        )
    return warmup


def _in_turns(parts: list[Assembly], world: World) -> np.ndarray:
    """Run the parts in turns; return their seconds, [parts, ranks, steps]."""
    loops = [part.trainer.steps() for part in parts]
    align = aligner(world)
    for step in interleave.progress(range(parts[0].trainer.total_steps), world.rank):
        for index in order(len(loops), step):
            align()
            next(loops[index])
    seconds = np.stack([part.trainer.clock.step_seconds() for part in parts])
    return world.gather(torch.from_numpy(seconds)).transpose(0, 1).numpy()
