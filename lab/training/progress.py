"""The progress of a run, and its total number of steps."""

from __future__ import annotations

import math
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from lab.record.schema import Record
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


class Bar(tqdm):
    """Steps done, and the throughput of the last seconds, evaluations and checkpoints included.

    Args:
        record: names samples and predictions, and has the batch size.
        total, first: the run's steps, and those that were done before this start.
        shown: false on all ranks but one.
    """

    def __init__(self, record: Record, total: int, first: int, shown: bool) -> None:
        self._record = record
        super().__init__(
            total=total,
            initial=first,
            desc=record.cell,
            unit="step",
            disable=not shown,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        """Return tqdm's values of a display, with the throughput before the metrics."""
        values = super().format_dict
        elapsed = values["elapsed"]
        rate = values["rate"] or (elapsed and (values["n"] - values["initial"]) / elapsed)
        if rate:
            samples_per_s = rate * self._record.batch_size
            rates = (self._record.rates(samples_per_s), self._compute(samples_per_s))
            values["postfix"] = ", ".join(filter(None, (*rates, values["postfix"])))
        return values

    def _compute(self, samples_per_s: float) -> str:
        """Return operations per second, and their share of the peak, as far as they are known."""
        compute = self._record.compute
        if compute is None or compute.flops_per_sample is None:
            return ""
        rate = samples_per_s * compute.flops_per_sample
        text = f"{rate / 1e12:.3g} TFLOP/s"
        return f"{text}, MFU {rate / peak:.1%}" if (peak := compute.peak_flops_per_s) else text
