"""Measure the cost of check=first: what it adds to a run's first steps, in steps."""

from __future__ import annotations

import time
from typing import Any

import torch
from omegaconf import DictConfig

from lab.benchmarks import interleave
from lab.benchmarks.request import Request
from lab.benchmarks.timing import aligner
from lab.certificate.check import NUM_EXCHANGES, Check
from lab.distributed import world as worlds
from lab.measure.turns import order
from lab.settings.config import ConfigError
from lab.training.assemble import Assembly, assembled, first_check, join
from lab.training.identity import surroundings

NEVER_ENDS = 10**9  # steps of the run: it ends when the rounds do


def measure(request: Request) -> dict[str, Any] | None:
    """Time the steps that a check looks at, with it and without it, in turns.

    Raises:
        ConfigError: a setting does not fit, or a strategy has nothing to check.
    """
    rows, configs = [], [variant.config for variant in request.variants]
    try:
        joined = [join(config) for config in configs]
        for variant, world in zip(request.variants, joined, strict=True):
            with assembled(variant.config, world) as parts:
                rounds = _in_turns(variant.config, parts, request.own["rounds"])
            plain_s, checked_s, line = rounds
            rows.append({"name": variant.label, "line": line, **cost(plain_s, checked_s)})
        world = joined[0]
        result = {"rows": rows, "num_rounds": request.own["rounds"], "world_size": world.size}
        result |= {"backend": world.comm.backend, **surroundings(world, *configs)}
        return result if world.rank == 0 else None
    finally:
        worlds.stop()


def cost(plain_s: list[float], checked_s: list[float]) -> dict[str, Any]:
    """Compute a step's seconds, and what a check adds to NUM_EXCHANGES of them.

    Args:
        plain_s, checked_s: seconds of so many steps, by round, on the slowest rank.
    """
    return {
        "step_s": interleave.middle([seconds / NUM_EXCHANGES for seconds in plain_s]),
        "added_s": interleave.interval(lambda c, p: c - p, checked_s, plain_s),
        "added_steps": interleave.interval(
            lambda c, p: (c - p) / (p / NUM_EXCHANGES), checked_s, plain_s
        ),
    }


def _in_turns(
    config: DictConfig, parts: Assembly, num_rounds: int
) -> tuple[list[float], list[float], str]:
    """Return the seconds of steps without and with a check, by round, and what it said."""
    trainer, world = parts.trainer, parts.trainer.world
    trainer.progress.total_steps = NEVER_ENDS
    align, seconds, line = aligner(world), torch.zeros(num_rounds, 2, dtype=torch.float64), ""
    _steps(parts, Check())  # warms up, and plans the buckets
    for number in interleave.progress(range(num_rounds), world.rank):
        for checked in order(2, number):
            align()
            began = time.perf_counter()
            wants = checked and first_check(config, trainer.model, trainer.sync, world)
            check = wants or Check()
            _steps(parts, check)
            seconds[number, checked] = time.perf_counter() - began
            if check.certificate:
                line = check.certificate.line
    if "not checked, because" in line or not line:
        raise ConfigError(line or "check: no certificate was reached")
    slowest = world.gather(seconds).amax(dim=0)
    return slowest[:, 0].tolist(), slowest[:, 1].tolist(), line


def _steps(parts: Assembly, check: Check) -> None:
    """Make the steps that a check looks at, and wait for the device."""
    trainer = parts.trainer
    trainer.check = check
    steps = trainer.steps()
    for _ in range(NUM_EXCHANGES):
        next(steps)
    if trainer.world.device.type == "cuda":
        torch.cuda.synchronize(trainer.world.device)
    steps.close()
