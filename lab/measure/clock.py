"""Times of steps and of their phases, on the host or on the GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

PHASES = ("data", "forward", "backward", "exchange", "update")

Mark = float | torch.cuda.Event


class Clock:
    """Marks moments during training and turns them into seconds afterwards.

    On a GPU a mark is an event in the current stream: setting it does not make the host wait, so
    that steps are timed by the device's own clock. Phases are marked only for a breakdown; a
    throughput run marks nothing but the ends of steps.

    Args:
        device: where the work runs.
        breakdown: mark phases too.
    """

    def __init__(self, device: torch.device, breakdown: bool) -> None:
        self._device = device
        self._breakdown = breakdown
        self._steps: list[tuple[Mark, Mark]] = []
        self._phases: list[dict[str, list[tuple[Mark, Mark]]]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step."""
        self._phases.append({})
        begin = mark(self._device)
        yield
        self._steps.append((begin, mark(self._device)))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the current step; parts of the same name add up (micro-batches)."""
        if not self._breakdown:
            yield
            return
        begin = mark(self._device)
        yield
        self._phases[-1].setdefault(name, []).append((begin, mark(self._device)))

    def step_seconds(self) -> np.ndarray:
        """Duration of each finished step: float64 [steps]."""
        self._synchronize()
        return np.array([seconds(*step) for step in self._steps], dtype=np.float64)

    def phase_seconds(self) -> np.ndarray:
        """Duration of each phase: float64 [steps, len(PHASES)]; NaN where none was marked."""
        self._synchronize()
        table = np.full((len(self._steps), len(PHASES)), np.nan)
        for row, phases in zip(table, self._phases, strict=False):
            for name, spans in phases.items():
                row[PHASES.index(name)] = sum(seconds(*span) for span in spans)
        return table

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def mark(device: torch.device) -> Mark:
    """This moment: of the host on a CPU, of the current stream on a GPU."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Mark, end: Mark) -> float:
    """Between two marks, which on a GPU the stream must have reached."""
    if isinstance(begin, torch.cuda.Event):
        return begin.elapsed_time(end) / 1000  # type: ignore[arg-type]
    return end - begin  # type: ignore[operator]
