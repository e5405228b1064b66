"""Benchmarks in which what is compared takes turns, step by step, in the same processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from lab.analysis.bootstrap import of_medians
from lab.assemble import Assembly, assemble
from lab.distributed.watch import Watch
from lab.distributed.world import World
from lab.measure.clock import PHASES
from lab.measure.statistics import round_means
from lab.report import surroundings

NEVER_S = 1e9  # no exchange of a benchmark is watched: the process group's timeout ends a hang


def compare_steps(configs: list[DictConfig], worlds: list[World]) -> dict[str, Any]:
    """Step times of two runs, a step of one after a step of the other.

    Args:
        worlds: the same ranks for each run, maybe with another way to communicate.

    Returns:
        The ratio of their medians (first over second) over pairs of adjacent steps, with a
        bootstrap interval that draws pairs; step time is that of the slowest rank. Where a
        strategy exchanges every so many steps, the pairs are rounds.
    """
    world = worlds[0]
    with _assembled(configs[0], world) as first, _assembled(configs[1], worlds[1]) as second:
        parts = [first, second]
        loops = [part.trainer.steps() for part in parts]
        for step in tqdm(range(first.trainer.total_steps), disable=world.rank != 0, unit="pair"):
            for loop in loops if step % 2 else reversed(loops):  # neither always goes first
                world.barrier()
                next(loop)
        every = math.lcm(*(part.trainer.sync.every for part in parts))
        a, b = (_slowest(part, world, configs[0].warmup_steps, every) for part in parts)
    ratio = of_medians(lambda x, y: x / y, a, b)
    names = [config.strategy for config in configs]
    return {
        "bench": f"{names[0]} / {names[1]}",
        "ratio": {"median": ratio.mid, "low": ratio.lo, "high": ratio.hi},
        "num_pairs": len(a),
        "step_s": {name: float(np.median(x)) for name, x in zip(names, (a, b), strict=True)},
        "mad_s": {name: _mad(x) for name, x in zip(names, (a, b), strict=True)},
        "num_parameters": [part.sizes["num_parameters"] for part in parts],
        "world_size": world.size,
        **surroundings(world),
    }


def time_recording(configs: list[DictConfig], worlds: list[World]) -> dict[str, Any]:
    """What book-keeping adds to a step: marks of the clock, losses, progress, the watch's lock."""
    world = worlds[0]
    with _assembled(configs[0], world) as part:
        trainer = part.trainer
        loss = torch.ones(())

        def step_without_work(_batches: object) -> None:
            for name in PHASES:
                with trainer.clock.phase(name):
                    pass
            trainer.losses.append(loss)

        trainer._step = step_without_work  # type: ignore[method-assign]
        began = time.perf_counter()
        for _ in tqdm(trainer.steps(), total=trainer.total_steps, disable=world.rank != 0):
            pass
        seconds = (time.perf_counter() - began) / trainer.total_steps
    return {
        "bench": "recording",
        "seconds_per_step": seconds,
        "share_of_a_50_ms_step": seconds / 0.05,
        "num_steps": trainer.total_steps,
        **surroundings(world),
    }


@contextmanager
def _assembled(config: DictConfig, world: World) -> Iterator[Assembly]:
    watch = Watch(world.store, world.rank, world.size, NEVER_S, lambda _: None)
    part = assemble(config, world, watch)
    yield part
    watch.close()
    part.worker.close()


def _slowest(part: Assembly, world: World, warmup: int, every: int) -> list[float]:
    """Seconds of the slowest rank in each timed step, or on average in rounds of `every` steps."""
    own = torch.from_numpy(part.trainer.clock.step_seconds())
    timed = world.gather(own).numpy()[:, warmup:]
    return round_means(timed, warmup, every).max(axis=0).tolist()


def _mad(values: list[float]) -> float:
    return float(np.median(np.abs(np.array(values) - np.median(values))))
