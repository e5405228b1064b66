"""Measure the cost of the lab's own book-keeping per step."""

from __future__ import annotations

import time
from typing import Any

import torch

from lab.benchmarks import interleave
from lab.benchmarks.harness import on_ranks
from lab.benchmarks.present import tabulate
from lab.benchmarks.request import Request
from lab.distributed.world import World
from lab.measure.spans import PHASES
from lab.training.dry import assembled

STEP_S = 0.05  # seconds of a fast step, for comparison


@on_ranks
def measure(request: Request, world: World) -> dict[str, Any]:
    """Time the clock's marks, losses, progress and the watchdog's lock, on rank 0."""
    with assembled(request.variants[0].config, world) as part:
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
    return {"rows": [{**row, "num_steps": trainer.total_steps}]}


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header and one line."""
    return tabulate(
        result["rows"],
        {
            "steps": lambda row: str(row["num_steps"]),
            "us per step": lambda row: f"{1e6 * row['seconds_per_step']:.2f}",
            "% of a 50 ms step": lambda row: f"{100 * row['share_of_a_50_ms_step']:.4f}",
        },
    )


def notes(_result: dict[str, Any]) -> list[str]:
    """Explain the number."""
    return ["steps without work: marks of the clock, losses, progress and the watchdog's lock"]
