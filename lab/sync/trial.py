"""Try two schedules in a run's first steps, and keep the faster one on the slowest rank."""

from __future__ import annotations

from statistics import median

import torch

from lab.measure.marks import Mark, mark, seconds


class Trial:
    """Times steps of two schedules, one after the other; the first step of each is discarded.

    Each has its steps in a row, because an exchange that outlasts its step runs into the next one.

    Args:
        trials: timed steps of each; 0: the second schedule is taken as it is.

    Attributes:
        costs: median seconds of a step under each; None: not known yet.
    """

    def __init__(self, trials: int, device: torch.device) -> None:
        self._trials, self._device = trials, device
        self.costs: list[float] | None = None
        self._spans: list[list[tuple[Mark, Mark]]] = [[], []]
        self._last: Mark | None = None  # end of the last step; None: it is not to be timed

    @property
    def second(self) -> bool:
        """Whether the next step is to follow the second schedule."""
        if self.costs is not None:
            return self.costs[1] < self.costs[0]
        return len(self._spans[0]) >= self._trials

    @property
    def is_over(self) -> bool:
        return self.costs is not None or self._trials == 0

    def end_step(self) -> list[float] | None:
        """Note the end of a step.

        Returns:
            This rank's `costs`, to be compared with the others', once it has them; else None.
        """
        if self.is_over:
            return None
        now, which = mark(self._device), self.second
        last, self._last = self._last, now
        if last is not None:
            self._spans[which].append((last, now))
        if which != self.second:
            self._last = None
        full = all(len(spans) == self._trials for spans in self._spans)
        return self._medians() if full else None

    def interrupt(self) -> None:
        """Leave out the step under way, in which other work ran."""
        self._last = None

    def _medians(self) -> list[float]:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # once a run
        return [median(seconds(*span) for span in spans) for spans in self._spans]
