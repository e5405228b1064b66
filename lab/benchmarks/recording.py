"""Measure the cost of the lab's own book-keeping per step."""

from __future__ import annotations

import time
from typing import Any

import torch

from lab.benchmarks import interleave
from lab.benchmarks.request import Request
from lab.distributed import world as worlds
from lab.measure.spans import PHASES
from lab.training.assemble import assembled, join
from lab.training.identity import surroundings

STEP_S = 0.05  # seconds of a fast step, for comparison


def measure(request: Request) -> dict[str, Any] | None:
    """Time the clock's marks, losses, progress and the watchdog's lock, on rank 0."""
    config = request.variants[0].config
    try:
        world = join(config)
        with assembled(config, world) as part:
            trainer = part.trainer
            loss = torch.ones(())

            def step_without_work(_batches: object) -> None:
                for name in PHASES:
                    with trainer.clock.phase(name):
                        pass
                trainer.losses.append(loss)

            trainer._step = step_without_work  # type: ignore[method-assign]
            began = time.perf_counter()
            for _ in interleave.progress(trainer.steps(), world.rank, trainer.total_steps):
                pass
            seconds = (time.perf_counter() - began) / trainer.total_steps
        row = {"seconds_per_step": seconds, "share_of_a_50_ms_step": seconds / STEP_S}
        rows = [{**row, "num_steps": trainer.total_steps}]
        result = {"rows": rows, "world_size": world.size, **surroundings(world)}
        return result if world.rank == 0 else None
    finally:
        worlds.stop()
