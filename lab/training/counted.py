"""Which steps of a run statistics count: those after warm-up, and of turns not the first."""

from __future__ import annotations

import numpy as np

from lab.measure.statistics import round_means
from lab.measure.steady import Warmup, warmup_of
from lab.training.loop import Loop


def warmup_in(trainer: Loop, step_s: np.ndarray) -> Warmup:
    """Return how many first steps are warm-up, and why."""
    if turns := trainer.turns:
        first = "step does" if turns.every == 1 else f"{turns.every} steps do"
        reason = (
            f"until it took turns of {turns.size} with other runs, whose first {first} not count"
        )
        return Warmup(turns.alone, reason)
    asked, every = trainer.config.warmup_steps, trainer.sync.every
    return warmup_of(step_s, asked, every, steps_of_trials(trainer))


def steps_of_trials(trainer: Loop) -> int:
    """Count the first steps in which others were tried: all so far, if they still are."""
    settled_at = trainer.sync.settled_at
    last = trainer.progress.step if settled_at is None else settled_at
    return max(0, last - trainer.first_step)


def timed_rounds(trainer: Loop, values: np.ndarray, warmup: int) -> np.ndarray:
    """Keep the `values` [ranks, steps, ...] that statistics count, by step or by round."""
    return round_means(*after_warmup(trainer, values, warmup))


def after_warmup(trainer: Loop, values: np.ndarray, warmup: int) -> tuple[np.ndarray, int, int]:
    """Return values [ranks, steps, ...], the number of the first step, and steps per round."""
    kept = values[:, counted_in(trainer, values.shape[1], warmup)]
    return kept, trainer.first_step + warmup, trainer.sync.every


def counted_in(trainer: Loop, num_steps: int, warmup: int) -> np.ndarray:
    """Tell which steps statistics count, [steps]."""
    return trainer.turns.counted(num_steps) if trainer.turns else np.arange(num_steps) >= warmup
