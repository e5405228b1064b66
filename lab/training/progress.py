"""A run as it goes: its progress bar, and its curves, handed to a recorder on the way."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lab.measure.spans import PHASES
from lab.record.recorders import Guarded, Recorder
from lab.record.schema import Record
from lab.task.metrics import metrics_of
from lab.training.trainer import Trainer

EXPOSED = PHASES.index("exchange")


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


class Curves:
    """Hands to a recorder the numbers of steps that the host knows. It never waits for the device.

    A step's numbers come once its loss has been read and the device has passed its end: a step or
    more late, and at once after the last one. All are rank 0's: of its share of the batch, on its
    clock.

    Args:
        recorder: None: nothing is recorded, as on ranks that never call `start`.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = Guarded(recorder)
        self._trainer: Trainer | None = None
        self._lr = array("d")  # of each step of this start of the run
        self._num_sent = 0

    def start(self, trainer: Trainer, directory: Path, study: str, config: dict[str, Any]) -> None:
        """Begin, before the first step."""
        self._trainer = trainer if self._recorder.works else None
        self._recorder.start(directory, study, config, trainer.first_step)

    def after_step(self) -> None:
        """Note the step that the host has just queued; record those that the device has done."""
        if self._trainer:
            self._lr.append(self._trainer.optimizer.param_groups[0]["lr"])
            self.send()

    def send(self) -> None:
        """Record every step whose numbers have reached the host."""
        if self._trainer:
            for values in _of_steps(self._trainer, self._lr, self._num_sent):
                self._num_sent += 1
                self._recorder.log(self._trainer.first_step + self._num_sent, values)

    def evaluated(self, result: Mapping[str, float]) -> None:
        """Record an evaluation, as `Trainer.evaluate` returns it; it waited for all steps."""
        self.send()
        values = metrics_of(result) | {"seconds": result["seconds"]}
        named = {f"test/{name}": value for name, value in values.items()}
        self._recorder.log(int(result["step"]), named)

    def finish(self, record: Record) -> None:
        """End, with the record of the run."""
        self._recorder.finish(record)


def _of_steps(trainer: Trainer, lr: Sequence[float], first: int) -> Iterator[dict[str, float]]:
    """Yield the numbers of each step from number `first` on, counted from this start of the run."""
    rows, losses = trainer.clock.finished(first), trainer.losses.read
    for step, row in enumerate(rows[: len(losses) - first], start=first):
        step_s, gap_s, *phases_s = row
        yield {
            "train/loss": losses[step],
            "train/lr": lr[step],
            "train/step_s": step_s,
            "train/samples_per_s": trainer.batch_size / (step_s + gap_s),
            "train/payload_bytes": trainer.traffic[3 * step],
            **({"train/exposed_exchange_s": phases_s[EXPOSED]} if phases_s else {}),
        }
