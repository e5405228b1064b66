"""Measure the cost of check=first: what it adds to a run's first steps, in steps."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from omegaconf import DictConfig

from lab.benchmarks import harness
from lab.benchmarks.present import Column, intervals, medians, on_ranks_of, text
from lab.benchmarks.request import BenchRequest
from lab.certificate.check import CertificateCheck
from lab.certificate.examination import NUM_EXCHANGES
from lab.distributed.world import World
from lab.settings.config import ConfigError
from lab.training.assemble import Assembly, assembled, first_check

NEVER_ENDS = 10**9  # steps of the run: it ends when the rounds do


@harness.on_ranks
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    """Time the steps that a check looks at, with it and without it, in turns."""
    rows, num_rounds = [], request.own["rounds"]
    for variant, joined in zip(request.variants, harness.worlds_of(request, world), strict=True):
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
        "step_s": harness.middle([seconds / NUM_EXCHANGES for seconds in plain_s]),
        "added_s": harness.difference(checked_s, plain_s),
        "added_steps": harness.interval(
            lambda c, p: (c - p) / (p / NUM_EXCHANGES), checked_s, plain_s
        ),
    }


def _in_turns(
    config: DictConfig, parts: Assembly, num_rounds: int
) -> tuple[list[float], list[float], str]:
    """Return the seconds of steps without and with a check, by round, and what it said."""
    trainer, world = parts.trainer, parts.trainer.world
    trainer.progress.total_steps = NEVER_ENDS
    align, said = harness.aligner(world), list[str]()

    def seconds(checked: bool) -> float:
        align()
        began = time.perf_counter()
        wants = checked and first_check(config, trainer.model, trainer.sync, world)
        check = wants or CertificateCheck()
        _steps(parts, check)
        took_s = time.perf_counter() - began
        if check.certificate:
            said.append(check.certificate.line)
        return took_s

    _steps(parts, CertificateCheck())  # warms up, and plans the buckets
    takes = [partial(seconds, False), partial(seconds, True)]
    own_s = harness.take_turns(takes, num_rounds, shows=world.rank == 0)
    if not said or "not checked, because" in said[-1]:
        raise ConfigError(said[-1] if said else "check: no certificate was issued")
    plain_s, checked_s = harness.of_slowest(own_s, world).tolist()
    return plain_s, checked_s, said[-1]


def _steps(parts: Assembly, check: CertificateCheck) -> None:
    """Make the steps that a check looks at, and wait for the device."""
    trainer = parts.trainer
    trainer.check = check
    steps = trainer.steps()
    for _ in range(NUM_EXCHANGES):
        next(steps)
    harness.wait_for(trainer.world.device)
    steps.close()


COLUMNS: dict[str, Column] = {
    "": text("name"),
    **medians("step (ms)", "step_s", 1e3, 2),
    "check adds (ms)": intervals("added_s", 1e3),
    "in steps": intervals("added_steps"),
}


def notes(result: dict[str, Any]) -> list[str]:
    return [
        f"medians of {result['num_rounds']} rounds {on_ranks_of(result)}: a run's first three "
        "steps, with the check and without it",
        "[95 % intervals] resample whole rounds",
        *(f"{row['name']}: {row['line']}" for row in result["rows"]),
    ]
