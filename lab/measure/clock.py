"""Times of steps and of their phases, on the host or on the GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from lab.measure.spans import Span

PHASES = ("data", "forward", "backward", "exchange", "update")
ROWS = {"exchange": "wait", "update": "optimizer"}  # of a timeline, whose exchanges are their own
KEPT_STEPS = 5  # the last ones, of which a timeline is made

Mark = float | torch.cuda.Event
Stage = TypeVar("Stage")


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
        self._exchanges: deque[list[tuple[str, str, Mark, Mark]]] = deque(maxlen=KEPT_STEPS)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step."""
        self._phases.append({})
        self._exchanges.append([])
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

    def traced(
        self, name: str, job: Callable[[], Iterator[Stage]], coded: bool
    ) -> Callable[[], Iterator[Stage]]:
        """`job`, an exchange of the current step, which a breakdown makes note when it runs.

        Args:
            name: of what it exchanges.
            coded: between its stages it encodes and decodes; these pieces are noted too.
        """
        if not self._breakdown:
            return job
        note = self._exchanges[-1].append

        def run() -> Iterator[Stage]:
            begin = piece = mark(self._device)
            for stage in job():
                if coded:
                    note(("codec", name, piece, mark(self._device)))
                yield stage
                piece = mark(self._device)
            end = mark(self._device)
            if coded and piece is not begin:
                note(("codec", name, piece, end))
            note(("exchange", name, begin, end))

        return run

    def spans(self, rank: int, first_step: int, num_warmup: int) -> list[Span]:
        """What a breakdown noted of the last steps, in seconds of this host's `perf_counter`.

        Args:
            rank: whose clock this is.
            first_step: number of the first step that it timed.
            num_warmup: steps at the start that are left out.
        """
        if not self._breakdown:
            return []
        now = mark(self._device)
        self._synchronize()
        now_s = time.perf_counter()
        num_steps = len(self._steps)
        noted: list[tuple[str, str, Mark, Mark]] = []
        for index in range(max(num_warmup, num_steps - KEPT_STEPS), num_steps):
            noted.append(("step", f"step {first_step + index}", *self._steps[index]))
            for phase, marks in self._phases[index].items():
                noted += [(ROWS.get(phase, phase), phase, *pair) for pair in marks]
            noted += self._exchanges[index - num_steps]
        return [
            Span(rank, row, name, now_s - seconds(begin, now), now_s - seconds(end, now))
            for row, name, begin, end in noted
        ]

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
