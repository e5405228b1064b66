"""Measure the cost of check=first: what it adds to a run's first steps, in steps."""

from __future__ import annotations

import time
from typing import Any

import torch
from omegaconf import DictConfig

from lab.benchmarks.harness import aligner, on_ranks, worlds_of
from lab.benchmarks.interleave import interval, middle, progress, turns
from lab.benchmarks.present import ranged, tabulate
from lab.benchmarks.request import Request
from lab.certificate.check import Check
from lab.certificate.examination import NUM_EXCHANGES
from lab.distributed.world import World
from lab.settings.config import ConfigError
from lab.training.assemble import Assembly, assembled, first_check

NEVER_ENDS = 10**9  # steps of the run: it ends when the rounds do


@on_ranks
def measure(request: Request, world: World) -> dict[str, Any]:
    """Time the steps that a check looks at, with it and without it, in turns.

    Raises:
        ConfigError: a setting does not fit, or a strategy has nothing to check.
    """
    rows, num_rounds = [], request.own["rounds"]
    for variant, joined in zip(request.variants, worlds_of(request, world), strict=True):
        with assembled(variant.config, joined) as parts:
            plain_s, checked_s, line = _in_turns(variant.config, parts, num_rounds)
        rows.append({"name": variant.label, "line": line, **cost(plain_s, checked_s)})
    return {"rows": rows, "num_rounds": num_rounds}


def cost(plain_s: list[float], checked_s: list[float]) -> dict[str, Any]:
    """Compute a step's seconds, and what a check adds to NUM_EXCHANGES of them.

    Args:
        plain_s, checked_s: seconds of so many steps, by round, on the slowest rank.
    """
    return {
        "step_s": middle([seconds / NUM_EXCHANGES for seconds in plain_s]),
        "added_s": interval(lambda c, p: c - p, checked_s, plain_s),
        "added_steps": interval(lambda c, p: (c - p) / (p / NUM_EXCHANGES), checked_s, plain_s),
    }


def _in_turns(
    config: DictConfig, parts: Assembly, num_rounds: int
) -> tuple[list[float], list[float], str]:
    """Return the seconds of steps without and with a check, by round, and what it said."""
    trainer, world = parts.trainer, parts.trainer.world
    trainer.progress.total_steps = NEVER_ENDS
    align, seconds, line = aligner(world), torch.zeros(num_rounds, 2, dtype=torch.float64), ""
    _steps(parts, Check())  # warms up, and plans the buckets
    for checked, number in turns(2, progress(range(num_rounds), world.rank)):
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


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each strategy."""
    return tabulate(
        result["rows"],
        {
            "": lambda row: row["name"],
            "step (ms)": lambda row: f"{1e3 * row['step_s']['median']:.2f}",
            "mad": lambda row: f"{1e3 * row['step_s']['mad']:.2f}",
            "check adds (ms)": lambda row: ranged(row["added_s"], 1e3),
            "in steps": lambda row: ranged(row["added_steps"]),
        },
    )


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns, and show what was certified."""
    return [
        f"medians of {result['num_rounds']} rounds on {result['world_size']} ranks "
        f"({result['backend']}): a run's first three steps, with the check and without it",
        "[95 % intervals] draw whole rounds",
        *(f"{row['name']}: {row['line']}" for row in result["rows"]),
    ]
