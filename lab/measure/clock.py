"""Clock: times of steps, of their phases and of a rank's own work, on the host or on the GPU.

Ranks that exchange end a step together, so the length of a step, and of the phase in which a rank
waits, tells nothing about the rank. Its own work does: what it takes to load a batch, to compute
forward, to compute backward until the last gradient is ready, to encode and decode, and to update.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from lab.measure import OWN, PHASES, Span

Mark = float | torch.cuda.Event
KEPT_STEPS = 5  # for the timeline
ROWS = {"exchange": "wait", "update": "optimizer"}  # tracks of a timeline; exchanges have their own

Stage = TypeVar("Stage")
Ends = tuple[float, float]  # begin and end, in seconds from the step's begin
Part = tuple[str, Mark, Mark]  # of a phase: label, begin and end
# A piece of an exchange's own work, between two waits: begin and end, the seconds within it that
# the rank waited for others, and whether forward and backward cannot go on meanwhile.
Piece = tuple[Mark, Mark, float, bool]


def mark(device: torch.device) -> Mark:
    """Mark the current moment: the host's on a CPU, the current stream's on a GPU."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks, which on a GPU the stream must have reached."""
    if type(begin) is float:  # asked first: steps of a CPU have tens of marks
        return end - begin  # type: ignore[operator]
    return begin.elapsed_time(end) / 1000  # type: ignore[union-attr, arg-type]


def since(begin: Mark, moments: Sequence[Mark]) -> list[float]:
    """Return the seconds from one mark to each of several; see `seconds`."""
    if type(begin) is float:
        return [moment - begin for moment in moments]  # type: ignore[operator]
    return [seconds(begin, moment) for moment in moments]


def passed(moment: Mark) -> bool:
    """Return whether the device has reached a mark; a host mark always has been."""
    return not isinstance(moment, torch.cuda.Event) or moment.query()


class EventPool:
    """CUDA events that are recorded again, once nobody needs their moments: a new one costs more.

    Attributes:
        used: those recorded since `used` was replaced.
        free: to be recorded again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used: list[torch.cuda.Event] = []
        self.free: list[torch.cuda.Event] = []

    def mark(self) -> Mark:
        """Mark the current moment of the current stream."""
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record()
        self.used.append(event)
        return event


@dataclass
class PassMarks:
    """Marks of one forward and backward.

    Attributes:
        forward: layers with their begin, in order.
        middle: end of the model's forward.
        backward: layers with the moments when their gradients were ready.
    """

    begin: Mark
    forward: list[tuple[str, Mark]] = field(default_factory=list[tuple[str, Mark]])
    middle: Mark | None = None
    backward: list[tuple[str, Mark]] = field(default_factory=list[tuple[str, Mark]])

    def spans(self) -> Iterator[tuple[str, str, Mark, Mark]]:
        """Yield pass, layer, begin and end.

        In forward a layer lasts until the next one begins, so it includes the activations and
        pooling after it. In backward it lasts from the last gradient of the layer above to its
        own; the last layer includes the loss.
        """
        assert self.middle is not None
        ends = [*(begin for _, begin in self.forward[1:]), self.middle]
        begins = [self.begin, *ends]
        for (name, _), begin, end in zip(self.forward, begins, ends, strict=False):
            yield "forward", name, begin, end
        before = self.middle
        for name, ready in self.backward:
            yield "backward", name, before, ready
            before = ready


@dataclass
class StepMarks:
    """Marks of one step.

    Attributes:
        after: end of the previous step; None after a pause.
        end: end of this step; None until then.
        phases: by name, the label, begin and end of each part.
        exchanges: track, name, begin and end of each span.
        overtime: begin and end of what the step left to do after its end.
        ready: when each bucket's last gradient was ready; key: the bucket's number.
        pieces: of exchanges' own work.
        passes: of the model, with their layers, if these are marked.
        events: all that were recorded from its begin to the next one's, of a GPU.
    """

    after: Mark | None
    begin: Mark
    end: Mark = 0.0
    phases: dict[str, list[Part]] = field(default_factory=dict)
    exchanges: list[tuple[str, str, Mark, Mark]] = field(default_factory=list)
    overtime: list[tuple[Mark, Mark]] = field(default_factory=list)
    ready: dict[int, Mark] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    passes: list[PassMarks] = field(default_factory=list[PassMarks])
    events: list[torch.cuda.Event] = field(default_factory=list[torch.cuda.Event])

    def passed(self) -> bool:
        """Return whether the device has reached all marks; some may lie after the step's end."""
        late = [*(end for _, end in self.overtime), *(end for _, end, *_ in self.pieces)]
        return passed(self.end) and all(passed(end) for end in reversed(late))

    def gap_seconds(self) -> float:
        """Return the time since the previous step; 0 after a pause."""
        return 0.0 if self.after is None else seconds(self.after, self.begin)

    def seconds(self) -> float:
        """Return the duration of the step, its overtime included."""
        return seconds(self.begin, self.end) + sum(seconds(*span) for span in self.overtime)

    def phase_seconds(self) -> Iterator[float]:
        """Yield the seconds of each of PHASES; NaN: not marked."""
        for name in PHASES:
            parts = self.phases.get(name)
            yield sum(seconds(*marks) for _, *marks in parts) if parts else np.nan

    def own_seconds(self, waits_in: Collection[str]) -> list[float]:
        """Return the seconds of OWN; NaN: unknown. Args: waits_in: see Clock."""
        own = {name: name not in waits_in for name in PHASES}
        own["backward"] |= bool(self.ready)
        parts = {name: self.phases.get(name, ()) if own[name] else () for name in PHASES}
        ends = [(b, e) for each in parts.values() for _, b, e in each]
        ends += [(b, e) for b, e, _, _ in self.pieces]
        times = iter(since(self.begin, [*itertools.chain.from_iterable(ends)]))
        pairs = zip(times, times, strict=True)
        spans = {name: [*itertools.islice(pairs, len(each))] for name, each in parts.items()}
        worked = [*pairs]
        # NaN: no exchange worked, or that of a library.
        exchange = _total(worked) - sum([waited_s for _, _, waited_s, _ in self.pieces])
        if self.ready and spans["backward"]:  # afterwards, DDP waits within backward
            begin_s, end_s = spans["backward"][-1]
            ready_s = max(since(self.begin, [*self.ready.values()]))
            spans["backward"][-1] = begin_s, min(end_s, ready_s)
        inside = [span for span, piece in zip(worked, self.pieces, strict=True) if piece[3]]
        forward, backward = [
            _total(spans[name]) - _shared(spans[name], inside) for name in ("forward", "backward")
        ]
        data, update = _total(spans["data"]), _total(spans["update"])
        return [self.gap_seconds(), data, forward, backward, exchange, update]

    def spans(self, name: str) -> Iterator[tuple[str, str, Mark, Mark]]:
        """Yield track, name, begin and end of the step, which is called `name`, and its parts."""
        yield "step", name, self.begin, self.end
        for phase, parts in self.phases.items():
            yield from ((ROWS.get(phase, phase), *part) for part in parts)
        for one in self.passes:
            yield from (("layer", name, begin, end) for _, name, begin, end in one.spans())
        yield from self.exchanges


class OwnTimes:
    """Own times of many steps, in little memory. Args: waits_in: see Clock."""

    def __init__(self, waits_in: Collection[str]) -> None:
        self._waits_in = waits_in
        self._rows = array("d")
        self._ready = array("d")  # of all steps, one after the other
        self._num_ready = array("i")  # of each step

    def add(self, step: StepMarks) -> None:
        """Keep a step's times."""
        self._rows.extend(step.own_seconds(self._waits_in))
        width = max(step.ready, default=-1) + 1
        ready = dict(zip(step.ready, since(step.begin, [*step.ready.values()]), strict=True))
        self._ready.extend([ready.get(bucket, math.nan) for bucket in range(width)])
        self._num_ready.append(width)

    def own_seconds(self) -> np.ndarray:
        """Return float64 [steps, len(OWN)]; NaN: unknown."""
        return np.array(self._rows).reshape(-1, len(OWN))

    def ready_seconds(self) -> np.ndarray:
        """Return seconds from a step's begin until each bucket was ready: float64 [steps, buckets].

        NaN: a step had fewer buckets, or the moment is unknown.
        """
        counts = np.array(self._num_ready, dtype=int)
        table = np.full((len(counts), counts.max(initial=0)), np.nan)
        table[np.arange(table.shape[1]) < counts[:, None]] = np.array(self._ready)
        return table


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
        passes: where marks of layers go, if anything marks them (see marked_layers); those of the
            step under way.
    """

    def __init__(
        self,
        device: torch.device,
        breakdown: bool,
        waits_in: Collection[str] = (),
        own: bool = True,
    ) -> None:
        self._device, self._pool = device, EventPool(device)
        self.on_gpu = device.type == "cuda"  # marks are events in a stream
        # What marks the current moment; a CPU's is no Python function.
        self._mark: Callable[[], Mark] = self._pool.mark if self.on_gpu else time.perf_counter
        self.passes: list[PassMarks] = []
        self._breakdown, self._own = breakdown, own
        self._current = StepMarks(None, 0.0)
        self._part: tuple[str, str, Mark] | None = None  # under way: phase, label, begin
        self._recent: deque[StepMarks] = deque()  # finished steps that still have marks
        self._spent: list[torch.cuda.Event] = []  # of the step that was the last to leave these
        self._rows = array("d")  # earlier steps: see _row
        self._row_length = 2 + len(PHASES) * breakdown
        self._own_times = OwnTimes(waits_in)  # of the same steps
        self._last_end: Mark | None = None
        self._paused: tuple[Mark, float] = 0.0, 0.0  # the same moment on the device and on the host
        self.host_error_s = 0.0  # the most by which the latter may be wrong

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one optimizer step."""
        self._pool.used = events = list[torch.cuda.Event]()
        self._current = step = StepMarks(self._last_end, self._mark(), events=events)
        self.passes = step.passes
        yield
        self.passes = []
        step.end = self._last_end = self._mark()
        self._end_part(step.end)
        self._recent.append(step)
        while len(self._recent) > KEPT_STEPS and (not self.on_gpu or self._recent[0].passed()):
            done = self._recent.popleft()
            self._rows.extend(self._row(done))
            self._own_times.add(done)
            # The next step may still need marks of this one, as its `after`.
            self._pool.free += self._spent
            self._spent = done.events

    def pause(self) -> None:
        """Synchronise with the device and stop timing until the next step begins."""
        self._synchronize()
        if self._last_end is not None:
            before_s = time.perf_counter()
            now = self._mark()
            self._synchronize()
            after_s = time.perf_counter()
            if isinstance(now, float):  # of the host's own clock: exact, whoever ran in between
                before_s = after_s = now
            self._paused, self._last_end = (now, (before_s + after_s) / 2), None
            self.host_error_s = (after_s - before_s) / 2

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
            self._end_part(self._mark())

    @contextmanager
    def overtime(self) -> Iterator[None]:
        """Time what the last step left to do, after its end; its seconds count towards it."""
        begin = self._mark()
        yield
        self._current.overtime.append((begin, self._mark()))

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Mark nothing of what is enclosed, which runs later than the host calls it."""
        own, self._own = self._own, False
        yield
        self._own = own

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
        if self._own and (latest or bucket not in self._current.ready):
            self._current.ready[bucket] = self._mark()

    @contextmanager
    def exchange_work(self) -> Iterator[None]:
        """Count what is enclosed as the exchange's own work, not as that of the phase around it."""
        if not self._own:
            yield
            return
        begin = self._mark()
        yield
        self._work(begin, self._mark(), 0.0, True)

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
        note = self._current.exchanges.append if self._breakdown else lambda _span: None

        def run() -> Iterator[Stage]:
            mark = self._mark
            begin = piece = mark()
            before = waited() if waited else 0.0
            for stage in job():
                end = mark()
                if coded:
                    note(("codec", name, piece, end))
                if waited:
                    self._work(piece, end, waited() - before, in_line)
                yield stage
                piece, before = mark(), waited() if waited else 0.0
            end = mark()
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
        return float(self.step_seconds().sum())

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
        times = copy.deepcopy(self._own_times)
        for step in self._recent:
            times.add(step)
        return times

    def _work(self, begin: Mark, end: Mark, waited_s: float, in_line: bool) -> None:
        if self._own:
            self._current.pieces.append((begin, end, waited_s, in_line))

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
        now = self._mark()
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


def _shared(spans: Sequence[Ends], inside: Sequence[Ends]) -> float:
    """Return the seconds of `inside`, exchanges' work, that lie within `spans`."""
    both = [(max(begin, b), min(end, e)) for begin, end in spans for b, e in inside]
    return sum([max(0.0, end - begin) for begin, end in both])  # a list: no call for each


def _total(spans: Sequence[Ends]) -> float:
    return sum([end - begin for begin, end in spans]) if spans else math.nan
