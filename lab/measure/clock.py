"""Clock: times of steps and of their phases, on the host or on the GPU."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from lab.measure.layer_marks import LayerMarks
from lab.measure.marks import Mark, mark, seconds
from lab.measure.own_time import OwnTimes
from lab.measure.spans import PHASES, Span
from lab.measure.step_marks import StepMarks

KEPT_STEPS = 5  # for the timeline

Stage = TypeVar("Stage")


class Clock:
    """A clock that marks moments during training and turns them into seconds afterwards.

    On a GPU a mark is an event in the current stream: it does not block the host, and the device's
    own clock times the step. Every run marks steps and, for the rank's own times, phases; only a
    breakdown keeps the spans of phases and exchanges. Marks become seconds once the device has
    passed them, so that a long run keeps few; the last steps keep theirs for a timeline.

    Args:
        device: where the work runs.
        breakdown: keep the times of phases too.
        waits_in: phases in which the rank may wait for others: no time of theirs is known to be
            its own, but of "backward" that until the last gradient is ready.
        own: mark what own times need; False, to measure what that costs.

    Attributes:
        layers: marks layers in each step while they are on.
    """

    def __init__(
        self,
        device: torch.device,
        breakdown: bool,
        waits_in: Collection[str] = (),
        own: bool = True,
    ) -> None:
        self._device = device
        self.layers = LayerMarks(device)
        self._breakdown, self._own = breakdown, own
        self._current = StepMarks(None, 0.0)
        self._part: tuple[str, str, Mark] | None = None  # under way: phase, label, begin
        self._recent: deque[StepMarks] = deque()  # finished steps that still have marks
        self._rows = array("d")  # earlier steps: see _row
        self._row_length = 2 + len(PHASES) * breakdown
        self._own_times = OwnTimes(waits_in)  # of the same steps
        self._seconds = 0.0  # total of these rows
        self._last_end: Mark | None = None
        self._paused: tuple[Mark, float] = 0.0, 0.0  # the same moment on the device and on the host

    @property
    def on_gpu(self) -> bool:
        """True if marks are events in a stream."""
        return self._device.type == "cuda"

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one optimizer step."""
        self._current = step = StepMarks(self._last_end, mark(self._device))
        self.layers.passes = step.passes
        yield
        self.layers.passes = []
        step.end = self._last_end = mark(self._device)
        self._end_part(step.end)
        self._recent.append(step)
        while len(self._recent) > KEPT_STEPS and self._recent[0].passed():
            done = self._recent.popleft()
            row = self._row(done)
            self._rows.extend(row)
            self._seconds += row[0]
            self._add_own(self._own_times, done)

    def pause(self) -> None:
        """Synchronise with the device and stop timing until the next step begins."""
        self._synchronize()
        if self._last_end is not None:
            now = mark(self._device)
            self._synchronize()
            self._paused, self._last_end = (now, time.perf_counter()), None

    @contextmanager
    def phase(self, name: str, label: str | None = None) -> Iterator[None]:
        """Time a part of the current step; parts of one name add up (micro-batches).

        A phase within another one interrupts it: each moment counts once.

        Args:
            label: names the part in a timeline; None: as the phase.
        """
        if not (self._breakdown or self._own):
            yield
            return
        outer = self._part
        self._begin_part(name, label or name)
        yield
        if outer:
            self._begin_part(*outer[:2])
        else:
            self._end_part(mark(self._device))

    @contextmanager
    def overtime(self) -> Iterator[None]:
        """Time what the last step left to do, after its end; its seconds count towards it."""
        begin = mark(self._device)
        yield
        self._current.overtime.append((begin, mark(self._device)))

    def next_phase(self, name: str) -> None:
        """Begin a phase where the one before ends; the first one begins with its step.

        A loop that calls this for "data" goes on until its step ends; `phase` is for the others.
        """
        if name == "data":
            self._part = name, name, self._current.begin
        elif self._part and self._own:
            self._begin_part(name, name)

    def ready(self, bucket: int, latest: bool = False) -> None:
        """Mark that the last gradient of a bucket is ready; its first mark counts, or the last."""
        if self._own and (latest or bucket not in self._current.own.ready):
            self._current.own.ready[bucket] = mark(self._device)

    @contextmanager
    def exchange_work(self) -> Iterator[None]:
        """Count what is enclosed as the exchange's own work, not as that of the phase around it."""
        if not self._own:
            yield
            return
        begin = mark(self._device)
        yield
        self._work(begin, mark(self._device), 0.0, True)

    def traced(
        self,
        name: str,
        job: Callable[[], Iterator[Stage]],
        coded: bool,
        waited: Callable[[], float] | None = None,
        in_line: bool = False,
    ) -> Callable[[], Iterator[Stage]]:
        """Wrap `job`, an exchange of the current step, so that its times are recorded.

        Args:
            name: names the bucket.
            coded: the job encodes and decodes between its stages; keep these spans too.
            waited: counts the seconds that the rank waited for others within stages; None: they
                cannot be told from work.
            in_line: backward cannot go on while the job works.
        """
        if not (self._breakdown or self._own):
            return job
        note = self._current.exchanges.append if self._breakdown else _drop

        def run() -> Iterator[Stage]:
            device = self._device
            begin = piece = mark(device)
            before = waited() if waited else 0.0
            for stage in job():
                end = mark(device)
                if coded:
                    note(("codec", name, piece, end))
                if waited:
                    self._work(piece, end, waited() - before, in_line)
                yield stage
                piece, before = mark(device), waited() if waited else 0.0
            end = mark(device)
            if coded and piece is not begin:
                note(("codec", name, piece, end))
            if waited:
                self._work(piece, end, waited() - before, in_line)
            note(("exchange", name, begin, end))

        return run

    def spans(self, rank: int, first_step: int, num_warmup: int) -> list[Span]:
        """Return a breakdown's spans of the last steps, in seconds of this host's `perf_counter`.

        Args:
            rank: this clock's rank.
            first_step: number of the first step that this clock timed.
            num_warmup: number of steps to leave out at the start.
        """
        if not self._breakdown:
            return []
        self.pause()
        paused, paused_s = self._paused
        kept = list(self._recent)[-KEPT_STEPS:]
        first = len(self._rows) // self._row_length + len(self._recent) - len(kept)
        noted: list[tuple[str, str, Mark, Mark]] = []
        for index, step in enumerate(kept, start=first):
            if index >= num_warmup:
                noted += step.spans(f"step {first_step + index}")
        return [
            Span(
                rank, row, name, paused_s - seconds(begin, paused), paused_s - seconds(end, paused)
            )
            for row, name, begin, end in noted
        ]

    def total_seconds(self) -> float:
        """Return the total duration of all finished steps, in seconds."""
        self._synchronize()
        return self._seconds + sum(step.seconds() for step in self._recent)

    def finished(self, first: int) -> list[list[float]]:
        """Return a row for each step `first`, ... that the device has passed; no host waits.

        Returns:
            Rows of a step's seconds, the gap before it and, in a breakdown, those of each phase
            (NaN: not marked).
        """
        length = self._row_length
        starts = range(first * length, len(self._rows), length)
        done = itertools.takewhile(StepMarks.passed, self._recent)
        rest = itertools.islice(done, max(0, first - len(self._rows) // length), None)
        return [*(self._rows[at : at + length].tolist() for at in starts), *map(self._row, rest)]

    def step_seconds(self) -> np.ndarray:
        """Return the duration of each finished step in seconds: float64 [steps]."""
        return self._table()[:, 0]

    def gap_seconds(self) -> np.ndarray:
        """Return the gap before each finished step in seconds: float64 [steps].

        A gap lasts from the end of the previous step; it is 0 at first and after a pause.
        """
        return self._table()[:, 1]

    def phase_seconds(self) -> np.ndarray:
        """Return the seconds of each phase: float64 [steps, len(PHASES)]; NaN: not marked."""
        table = self._table()
        return table[:, 2:] if self._breakdown else np.full((len(table), len(PHASES)), np.nan)

    def own_times(self) -> OwnTimes:
        """Return the own times of all finished steps."""
        self._synchronize()
        times = self._own_times.copy()
        for step in self._recent:
            self._add_own(times, step)
        return times

    def _add_own(self, times: OwnTimes, step: StepMarks) -> None:
        times.add(step.own, step.phases, step.gap_seconds(), partial(seconds, step.begin))

    def _work(self, begin: Mark, end: Mark, waited_s: float, in_line: bool) -> None:
        if self._own:
            self._current.own.pieces.append((begin, end, waited_s, in_line))

    def _table(self) -> np.ndarray:
        """Return a row for each finished step."""
        self._synchronize()
        recent = [value for step in self._recent for value in self._row(step)]
        return np.array(self._rows + array("d", recent)).reshape(-1, self._row_length)

    def _row(self, step: StepMarks) -> list[float]:
        """Return the seconds of the step, the gap before it and, in a breakdown, each phase."""
        phases = step.phase_seconds() if self._breakdown else ()
        return [step.seconds(), step.gap_seconds(), *phases]

    def _begin_part(self, name: str, label: str) -> None:
        """Begin a part of a phase, which ends the one under way."""
        now = mark(self._device)
        self._end_part(now)
        self._part = name, label, now

    def _end_part(self, now: Mark) -> None:
        if self._part:
            name, label, begin = self._part
            self._current.phases.setdefault(name, []).append((label, begin, now))
            self._part = None

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self._device)


def _drop(_span: tuple[str, str, Mark, Mark]) -> None:
    """Keep no span."""
