"""Inject a delay into one phase of one rank, run after run, and see whether it is found by name.

Runs with a delay and clean runs take turns, so both meet the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from lab.benchmarks.harness import on_ranks
from lab.benchmarks.present import Column, number, on_ranks_of, text
from lab.benchmarks.request import BenchRequest
from lab.cluster.settings import PHASES, Straggler
from lab.distributed.world import World
from lab.measure.statistics import Interval, least_warmup, wilson
from lab.measure.stragglers import MIN_STEPS, Slow, Times, stragglers
from lab.settings.config import ConfigError
from lab.settings.streams import progress
from lab.sync.pattern import comparable_phases, pattern_of
from lab.training.assemble import assembled

SEED = 0
DELAYS_S = 0.02, 0.2  # drawn evenly in their logarithm
CLOSE = 0.1  # the share by which a delay may be off
OUTCOMES = ("found", "wrong rank", "wrong phase", "missed")


@dataclass(frozen=True)
class DelayTrial:
    """One run: the delay that was injected, if any, and the slow ranks that were found."""

    planted: Straggler | None
    step_s: float
    found: Sequence[Slow]

    @property
    def outcome(self) -> str:
        """One of OUTCOMES. To accuse another rank too is wrong; so is another phase first."""
        assert self.planted
        if not self.found:
            return "missed"
        if {slow.rank for slow in self.found} != {self.planted.rank}:
            return "wrong rank"
        return "found" if self.found[0].phase == self.planted.phase else "wrong phase"

    @property
    def error(self) -> float:
        """The share by which the delay is off, of a trial that found it."""
        assert self.planted
        return self.found[0].delay_s / self.planted.delay_s - 1


@on_ranks
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    config = request.config
    can = PHASES if pattern_of(config).takes_exchanges else set(PHASES) - {"exchange"}
    phases = [phase for phase in PHASES if phase in can and phase in comparable_phases(config)]
    draws = draw(request.own["runs"], world.size, phases)
    trials = [
        DelayTrial(delay, step_s, stragglers(own_s, step_s, comparable_phases(config)))
        for injected in progress(draws, "run", world.rank == 0)
        for delay in (injected, None)
        for own_s, step_s in [_run(_with(config, delay), world)]
    ]
    return summary(trials)


def draw(num_runs: int, num_ranks: int, phases: Sequence[str]) -> list[Straggler]:
    """Draw the delays to inject: phases in turn, ranks and delays at random; alike on all ranks."""
    random = np.random.default_rng(SEED)
    low, high = np.log(DELAYS_S)
    return [
        Straggler(
            int(random.integers(num_ranks)),
            phases[number % len(phases)],
            float(np.exp(random.uniform(low, high))),
        )
        for number in range(num_runs)
    ]


def summary(trials: Sequence[DelayTrial]) -> dict[str, Any]:
    """Count outcomes by phase and in all, and accusations of clean runs."""
    planted = [trial for trial in trials if trial.planted]
    phases = dict.fromkeys(trial.planted.phase for trial in planted if trial.planted)
    rows = [
        _row(phase, [t for t in planted if t.planted and t.planted.phase == phase])
        for phase in phases
    ]
    clean = [trial for trial in trials if not trial.planted]
    accused = sum(bool(trial.found) for trial in clean)
    return {
        "rows": [*rows, _row("all", planted)],
        "clean": {"runs": len(clean), "accused": accused, "share": wilson(accused, len(clean))},
        "step_s": float(np.median([trial.step_s for trial in clean])),
        "trials": [asdict(trial) for trial in trials],
    }


def _row(name: str, trials: Sequence[DelayTrial]) -> dict[str, Any]:
    outcomes = [trial.outcome for trial in trials]
    errors = [abs(trial.error) for trial in trials if trial.outcome == "found"]
    return {
        "name": name,
        "runs": len(trials),
        **{outcome: outcomes.count(outcome) for outcome in OUTCOMES},
        "share": wilson(outcomes.count("found"), len(trials)),
        "close": sum(error <= CLOSE for error in errors),
        "error": {"median": float(np.median(errors)), "most": max(errors)} if errors else None,
    }


def _run(config: DictConfig, world: World) -> tuple[Times, float]:
    """Train; return own times [ranks, timed steps, OWN], and the median step of the slowest."""
    own_s, step_s = trained(config, world)
    if step_s.shape[1] < MIN_STEPS:
        least = least_warmup(config.warmup_steps) + MIN_STEPS
        raise ConfigError(f"steps={config.steps}: finding a slow rank takes at least {least} steps")
    return own_s, float(np.median(step_s.max(axis=0)))


def trained(config: DictConfig, world: World) -> tuple[Times, Times]:
    """Train; return own times [ranks, timed steps, OWN], and steps [ranks, timed steps]."""
    with assembled(config, world) as part:
        trainer = part.trainer
        for _ in trainer.steps():
            pass
        tables = trainer.clock.own_times().own_seconds(), trainer.clock.step_seconds()
    warmup = least_warmup(config.warmup_steps)
    own_s, step_s = (world.gather(torch.from_numpy(each)).numpy()[:, warmup:] for each in tables)
    return own_s, step_s


def _with(config: DictConfig, planted: Straggler | None) -> DictConfig:
    if planted is None:
        return config
    changed = config.copy()
    changed.straggler = OmegaConf.create(
        {
            "_target_": "lab.cluster.settings.planted",
            "delay_ms": 1e3 * planted.delay_s,
            **{key: getattr(planted, key) for key in ("rank", "phase", "every")},
        }
    )
    return changed


COLUMNS: dict[str, Column] = {
    "delayed phase": text("name"),
    "runs": text("runs"),
    **{outcome: text(outcome) for outcome in OUTCOMES},
    "% found": lambda row: _percent(row["share"]),
    "within 10 %": text("close"),
    "error (%)": number("error.median", 100, 2),
    "most": number("error.most", 100, 2),
}


def notes(result: dict[str, Any]) -> list[str]:
    clean, low, high = result["clean"], *(1e3 * each for each in DELAYS_S)
    return [
        f"in {clean['accused']} of {clean['runs']} runs without a delay, a rank is named as slow: "
        f"{_percent(clean['share'])} %",
        f"delays of {low:.0f} to {high:.0f} ms in steps of {1e3 * result['step_s']:.1f} ms "
        f"{on_ranks_of(result)}; [95 % intervals] are Wilson's",
        f"within {100 * CLOSE:.0f} %: number of delays found to within this error; error, most: "
        "the median and the largest error",
    ]


def _percent(share: dict[str, float]) -> str:
    return f"{Interval.read(share).scaled(100):.1f}"
