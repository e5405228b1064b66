"""The progress bar of a run."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any

from tqdm import tqdm

from lab.record.schema import Record


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
