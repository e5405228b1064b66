"""The progress of a run, and its total number of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lab.settings.config import Settings

DEFAULT_EPOCHS = 30


@dataclass
class Progress:
    """The progress of training; part of every checkpoint.

    Attributes:
        total_steps: optimizer steps of the whole run, including those before a resume.
        evaluations: each holds its step, seconds of training, and the task's metrics.
    """

    total_steps: int
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    num_skipped_steps: int = 0
    evaluations: list[dict[str, float]] = field(default_factory=list)


def total_steps(
    config: Settings, num_train: int, batch_size: int, step: int = 0, samples: int = 0
) -> int:
    """Return the optimizer steps of the whole run.

    Args:
        num_train: samples of an epoch.
        batch_size: global.
        step, samples: progress of a checkpoint, possibly with another batch size.
    """
    if config.steps is not None:
        return config.steps
    epochs = DEFAULT_EPOCHS if config.epochs is None else config.epochs
    return step + max(0, math.ceil((epochs * num_train - samples) / batch_size))
