"""Own time: the seconds that a rank works in a step, without the time it waits for others.

Ranks that exchange end a step together, so the length of a step, and of the phase in which a rank
waits, tells nothing about it. Its own work does: what it takes to load a batch, to compute forward,
to compute backward until the last gradient is ready, to encode and decode, and to update.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lab.measure.marks import Mark
from lab.measure.spans import OWN, PHASES

At = Callable[[Mark], float]  # seconds from the step's begin to a mark
Span = tuple[float, float]  # begin and end, in these seconds
Part = tuple[str, Mark, Mark]  # of a phase: label, begin and end
Phases = Mapping[str, Sequence[Part]]  # the parts of each of PHASES

# A piece of an exchange's own work, between two waits: begin and end, the seconds within it that
# the rank waited for others, and whether forward and backward cannot go on meanwhile.
Piece = tuple[Mark, Mark, float, bool]


@dataclass
class OwnMarks:
    """Marks of one step besides those of its phases.

    Attributes:
        ready: when each bucket's last gradient was ready; key: the bucket's number.
    """

    ready: dict[int, Mark] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)

    def row(self, phases: Phases, gap_s: float, at: At, waits_in: Collection[str]) -> list[float]:
        """Return the seconds of OWN; NaN: unknown.

        Args:
            gap_s: time since the previous step.
            waits_in: see Clock.
        """
        own = {name: name not in waits_in for name in PHASES}
        own["backward"] |= bool(self.ready)
        spans = {
            name: [(at(b), at(e)) for _, b, e in phases.get(name, ())] if own[name] else []
            for name in PHASES
        }
        pieces = [(at(b), at(e), waited_s) for b, e, waited_s, _ in self.pieces]
        # NaN: no exchange worked, or that of a library.
        exchange = sum(e - b - waited_s for b, e, waited_s in pieces) if pieces else math.nan
        if self.ready and spans["backward"]:  # afterwards, DDP waits within backward
            begin, end = spans["backward"][-1]
            spans["backward"][-1] = begin, min(end, max(map(at, self.ready.values())))
        inside = [(at(b), at(e)) for b, e, _, is_inside in self.pieces if is_inside]
        forward, backward = (
            _total(spans[name]) - _shared(spans[name], inside) for name in ("forward", "backward")
        )
        return [gap_s, _total(spans["data"]), forward, backward, exchange, _total(spans["update"])]


class OwnTimes:
    """Own times of many steps, in little memory.

    Args:
        waits_in: see Clock.
    """

    def __init__(self, waits_in: Collection[str]) -> None:
        self._waits_in = waits_in
        self._rows = array("d")
        self._ready = array("d")  # of all steps, one after the other
        self._num_ready = array("i")  # of each step

    def add(self, marks: OwnMarks, phases: Phases, gap_s: float, at: At) -> None:
        """Keep a step's times; see OwnMarks.row."""
        self._rows.extend(marks.row(phases, gap_s, at, self._waits_in))
        width = max(marks.ready, default=-1) + 1
        self._ready.extend(at(m) if (m := marks.ready.get(i)) else math.nan for i in range(width))
        self._num_ready.append(width)

    def copy(self) -> OwnTimes:
        """Return a copy, to which more steps can be added."""
        copied = OwnTimes(self._waits_in)
        copied._rows, copied._ready = self._rows[:], self._ready[:]
        copied._num_ready = self._num_ready[:]
        return copied

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


def _shared(spans: Sequence[Span], inside: Sequence[Span]) -> float:
    """Return the seconds of `inside`, exchanges' work, that lie within `spans`."""
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in spans for b, e in inside)


def _total(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in spans) if spans else math.nan
