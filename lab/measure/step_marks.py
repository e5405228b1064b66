"""Marks of one step: of its phases and exchanges, and what they come to once they have passed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from lab.measure.layer_marks import Pass
from lab.measure.marks import Mark, passed, seconds
from lab.measure.own_time import OwnMarks, Part
from lab.measure.spans import PHASES

ROWS = {"exchange": "wait", "update": "optimizer"}  # tracks of a timeline; exchanges have their own


@dataclass
class StepMarks:
    """Marks of one step.

    Attributes:
        after: end of the previous step; None after a pause.
        end: end of this step; None until then.
        phases: by name, the label, begin and end of each part.
        exchanges: track, name, begin and end of each span.
        overtime: begin and end of what the step left to do after its end.
        own: see OwnMarks.
        passes: of the model, with their layers, if these are marked.
    """

    after: Mark | None
    begin: Mark
    end: Mark = 0.0
    phases: dict[str, list[Part]] = field(default_factory=dict)
    exchanges: list[tuple[str, str, Mark, Mark]] = field(default_factory=list)
    overtime: list[tuple[Mark, Mark]] = field(default_factory=list)
    own: OwnMarks = field(default_factory=OwnMarks)
    passes: list[Pass] = field(default_factory=list[Pass])

    def passed(self) -> bool:
        """Return whether the device has reached all marks; some may lie after the step's end."""
        late = [*(end for _, end in self.overtime), *(end for _, end, *_ in self.own.pieces)]
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

    def spans(self, name: str) -> Iterator[tuple[str, str, Mark, Mark]]:
        """Yield track, name, begin and end of the step, which is called `name`, and its parts."""
        yield "step", name, self.begin, self.end
        for phase, parts in self.phases.items():
            yield from ((ROWS.get(phase, phase), *part) for part in parts)
        for one in self.passes:
            yield from (("layer", name, begin, end) for _, name, begin, end in one.spans())
        yield from self.exchanges
