"""The progress bar of a run."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from tqdm import tqdm

SHOW_EVERY_S = 1.0


class Bar:
    """Steps done, throughput, and the metrics of the last evaluation.

    Args:
        name: of the run.
        total, first: optimizer steps of the run, and those done before.
        shown: false on ranks that print nothing.
        batch_size: global, in samples.
        unit: name of one sample.
        flops_per_sample: forward and backward; None: unknown.
    """

    def __init__(
        self,
        name: str,
        total: int,
        first: int,
        shown: bool,
        batch_size: int,
        unit: str,
        flops_per_sample: float | None,
    ) -> None:
        self._bar: tqdm[Any] = tqdm(
            total=total,
            initial=first,
            desc=name,
            unit="step",
            disable=not shown,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )
        self._batch_size, self._unit, self._flops = batch_size, unit, flops_per_sample
        self._rate = self._metrics = ""
        self._since_s, self._num_steps = time.monotonic(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self) -> None:
        """Count a step."""
        self._num_steps += 1
        now_s = time.monotonic()
        if now_s - self._since_s > SHOW_EVERY_S:
            samples_per_s = self._num_steps * self._batch_size / (now_s - self._since_s)
            self._rate = f"{samples_per_s:.4g} {self._unit}s/s"
            if self._flops is not None:
                self._rate += f", {samples_per_s * self._flops / 1e12:.3g} TFLOP/s"
            self._since_s, self._num_steps = now_s, 0
            self._show()
        self._bar.update()

    def note(self, metrics: dict[str, float]) -> None:
        """Show the metrics of an evaluation."""
        self._metrics = ", ".join(f"{name}={value:.4g}" for name, value in metrics.items())
        self._show()

    def _show(self) -> None:
        text = ", ".join(filter(None, (self._rate, self._metrics)))
        self._bar.set_postfix_str(text, refresh=False)
