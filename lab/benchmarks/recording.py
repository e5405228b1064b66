"""Measure the cost of the lab's own book-keeping per step."""

from __future__ import annotations

import time
from typing import Any

import torch

from lab.benchmarks.harness import on_ranks
from lab.benchmarks.present import Column, number, text
from lab.benchmarks.request import BenchRequest
from lab.distributed.world import World
from lab.measure import PHASES
from lab.settings.streams import progress
from lab.training.assemble import assembled

STEP_S = 0.05  # seconds of a fast step, for comparison


@on_ranks
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    """Time the clock's marks, losses, progress and the watchdog's lock, on rank 0."""
    with assembled(request.config, world) as part:
        trainer = part.trainer
        loss = torch.ones(())

        def step_without_work(_batches: object) -> None:
            for name in PHASES:
                with trainer.clock.phase(name):
                    pass
            trainer.losses.append(loss)

        trainer._step = step_without_work  # type: ignore[method-assign]
        began = time.perf_counter()
        for _ in progress(trainer.steps(), "step", world.rank == 0, trainer.total_steps):
            pass
        seconds = (time.perf_counter() - began) / trainer.total_steps
    return {"rows": [{"seconds_per_step": seconds, "num_steps": trainer.total_steps}]}


COLUMNS: dict[str, Column] = {
    "steps": text("num_steps"),
    "us per step": number("seconds_per_step", 1e6, 2),
    "% of a 50 ms step": number("seconds_per_step", 100 / STEP_S, 4),
}


def notes(_result: dict[str, Any]) -> list[str]:
    return ["steps without work: marks of the clock, losses, progress and the watchdog's lock"]
