"""Measure what the marks of own times add to a step: a step with them and one without, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from lab.benchmarks import interleave
from lab.benchmarks.request import Request
from lab.benchmarks.timing import aligner
from lab.distributed import world as worlds
from lab.distributed.collective import Done
from lab.distributed.world import World
from lab.measure.clock import Clock
from lab.measure.spans import PHASES
from lab.measure.statistics import least_warmup
from lab.measure.turns import order
from lab.training.assemble import Assembly, assembled, join
from lab.training.identity import surroundings

NAMES = ("with marks", "without")
STAGES = 2  # of an exchange, in the steps without work
EMPTY_STEPS = 2000


def measure(request: Request) -> dict[str, Any] | None:
    """Measure; return the result on rank 0.

    Raises:
        ConfigError: a setting does not fit the data, devices and ranks at hand.
    """
    config = request.only_config
    try:
        world = join(config)
        with ExitStack() as stack:
            parts = [stack.enter_context(assembled(config, world)) for _ in NAMES]
            _without(parts[1])
            times = _in_turns(parts, world)[:, least_warmup(config.warmup_steps) :]
            num_buckets = parts[0].trainer.clock.own_times().ready_seconds().shape[1]
        rows = [
            {"name": name, "step_s": interleave.middle(each)}
            for name, each in zip(NAMES, times, strict=True)
        ]
        result = {
            "rows": rows,
            "ratio": interleave.ratio(*times),
            "added_s": interleave.interval(lambda a, b: a - b, *times),
            "num_pairs": times.shape[1],
            "num_buckets": num_buckets,
            "marks_s": _empty_step_s(True, num_buckets) - _empty_step_s(False, num_buckets),
            "world_size": world.size,
            "backend": world.comm.backend,
            **surroundings(world, config),
        }
        return result if world.rank == 0 else None
    finally:
        worlds.stop()


def _without(part: Assembly) -> None:
    """Let a trainer mark nothing but the ends of its steps."""
    clock = Clock(part.trainer.world.device, breakdown=False, own=False)
    part.trainer.clock = part.trainer.sync.clock = clock


def _in_turns(parts: list[Assembly], world: World) -> np.ndarray:
    """Return the seconds of whole turns on the slowest rank, [parts, steps].

    They include what the clock does between steps. On GPUs, which the host runs ahead of, they are
    the steps' alone.
    """
    loops, align = [part.trainer.steps() for part in parts], aligner(world)
    turns = np.zeros((len(parts), parts[0].trainer.total_steps))
    for step in interleave.progress(range(turns.shape[1]), world.rank):
        for index in order(len(loops), step):
            align()
            began = time.perf_counter()
            next(loops[index])
            turns[index, step] = time.perf_counter() - began
    if world.device.type == "cuda":
        turns = np.stack([part.trainer.clock.step_seconds() for part in parts])
    return world.gather(torch.from_numpy(turns)).numpy().max(axis=0)


def _empty_step_s(own: bool, num_buckets: int) -> float:
    """Return the seconds of processor time for a step without work, with `num_buckets`."""
    clock = Clock(torch.device("cpu"), breakdown=False, own=own)

    def job() -> Iterator[Done]:
        for _ in range(STAGES):
            yield Done()

    began = time.thread_time()
    for _ in range(EMPTY_STEPS):
        with clock.step():
            for phase in PHASES:
                with clock.phase(phase):
                    pass
            for bucket in range(num_buckets):
                clock.ready(bucket)
                with clock.exchange_work():
                    pass
                for _ in clock.traced("", job, True, lambda: 0.0, in_line=True)():
                    pass
    return (time.thread_time() - began) / EMPTY_STEPS
