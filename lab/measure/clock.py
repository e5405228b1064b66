"""Clock: times of steps and of their phases, on the host or on the GPU."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from lab.measure.spans import PHASES, Span

ROWS = {"exchange": "wait", "update": "optimizer"}  # tracks of a timeline; exchanges have their own
KEPT_STEPS = 5  # for the timeline

Mark = float | torch.cuda.Event
Stage = TypeVar("Stage")


@dataclass
class _Step:
    """Marks of one step.

    Attributes:
        after: end of the previous step; None after a pause.
        end: end of this step; None until then.
        phases: by name, the label, begin and end of each part.
        exchanges: track, name, begin and end of each span.
        overtime: begin and end of what the step left to do after its end.
    """

    after: Mark | None
    begin: Mark
    end: Mark = 0.0
    phases: dict[str, list[tuple[str, Mark, Mark]]] = field(default_factory=dict)
    exchanges: list[tuple[str, str, Mark, Mark]] = field(default_factory=list)
    overtime: list[tuple[Mark, Mark]] = field(default_factory=list)

    def seconds(self) -> float:
        return seconds(self.begin, self.end) + sum(seconds(*span) for span in self.overtime)


class Clock:
    """A clock that marks moments during training and turns them into seconds afterwards.

    On a GPU a mark is an event in the current stream: it does not block the host, and the device's
    own clock times the step. Only a breakdown marks phases; a throughput run marks only the ends of
    steps. Marks become seconds once the device has passed them, so that a long run keeps few; the
    last steps keep theirs for a timeline.

    Args:
        device: where the work runs.
        breakdown: mark phases too.
    """

    def __init__(self, device: torch.device, breakdown: bool) -> None:
        self._device = device
        self._breakdown = breakdown
        self._current = _Step(None, 0.0)
        self._phase: tuple[str, str, Mark] | None = None  # under way: name, label, begin
        self._recent: deque[_Step] = deque()  # finished steps that still have marks
        self._rows = array("d")  # earlier steps: see _row
        self._row_length = 2 + len(PHASES) * breakdown
        self._seconds = 0.0  # total of these rows
        self._last_end: Mark | None = None
        self._paused: tuple[Mark, float] = 0.0, 0.0  # the same moment on the device and on the host

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one optimizer step."""
        self._current = step = _Step(self._last_end, mark(self._device))
        yield
        step.end = self._last_end = mark(self._device)
        self._recent.append(step)
        while len(self._recent) > KEPT_STEPS and _passed(self._recent[0].end):
            row = self._row(self._recent.popleft())
            self._rows.extend(row)
            self._seconds += row[0]

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
        if not self._breakdown:
            yield
            return
        outer = self._phase
        self._turn_to(name, label or name)
        yield
        self._turn_to(*outer[:2]) if outer else self._turn_to(None)

    @contextmanager
    def overtime(self) -> Iterator[None]:
        """Time what the last step left to do, after its end; its seconds count towards it."""
        begin = mark(self._device)
        yield
        self._current.overtime.append((begin, mark(self._device)))

    def traced(
        self, name: str, job: Callable[[], Iterator[Stage]], coded: bool
    ) -> Callable[[], Iterator[Stage]]:
        """Wrap `job`, an exchange of the current step, so that a breakdown records its spans.

        Args:
            name: names the bucket.
            coded: the job encodes and decodes between its stages; record these spans too.
        """
        if not self._breakdown:
            return job
        note = self._current.exchanges.append

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
            if index < num_warmup:
                continue
            noted.append(("step", f"step {first_step + index}", step.begin, step.end))
            for phase, marks in step.phases.items():
                noted += [(ROWS.get(phase, phase), *part) for part in marks]
            noted += step.exchanges
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
        late = itertools.takewhile(lambda step: _passed(step.end), self._recent)
        rest = itertools.islice(late, max(0, first - len(self._rows) // length), None)
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

    def _table(self) -> np.ndarray:
        """Return a row for each finished step."""
        self._synchronize()
        recent = [value for step in self._recent for value in self._row(step)]
        return np.array(self._rows + array("d", recent)).reshape(-1, self._row_length)

    def _row(self, step: _Step) -> list[float]:
        """Return the seconds of the step, the gap before it and, in a breakdown, each phase."""
        gap_s = 0.0 if step.after is None else seconds(step.after, step.begin)
        row = [step.seconds(), gap_s]
        for name in PHASES if self._breakdown else ():
            spans = step.phases.get(name)
            row.append(sum(seconds(*marks) for _, *marks in spans) if spans else np.nan)
        return row

    def _turn_to(self, name: str | None, label: str = "") -> None:
        """End the part of a phase that is under way, and begin one of `name`; None: of none."""
        now = mark(self._device)
        if self._phase:
            ended, its_label, begin = self._phase
            self._current.phases.setdefault(ended, []).append((its_label, begin, now))
        self._phase = (name, label, now) if name else None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def mark(device: torch.device) -> Mark:
    """Mark the current moment: the host's on a CPU, the current stream's on a GPU."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks, which on a GPU the stream must have reached."""
    if isinstance(begin, torch.cuda.Event):
        return begin.elapsed_time(end) / 1000  # type: ignore[arg-type]
    return end - begin  # type: ignore[operator]


def _passed(moment: Mark) -> bool:
    """Return whether the device has reached a mark; a host mark always has been."""
    return not isinstance(moment, torch.cuda.Event) or moment.query()
