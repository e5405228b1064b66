"""Try two schedules in a run's first steps, and keep the faster one on the slowest rank."""

from __future__ import annotations

from collections import deque
from statistics import median

import torch

from lab.measure.marks import Mark, mark, seconds

COLD = 2  # steps of each that come first: buffers and connections are new, and up to 40 % slower
GAIN = 0.02  # share of a step by which the second schedule has to be faster


class Trial:
    """Times steps of two schedules: some of both that do not count, then some of each that do.

    Each has its steps in a row, because an exchange that outlasts its step runs into the next one;
    so the first step of a row never counts.

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
        # The step in which the order was planned is the first.
        rows = [(0, 1 + COLD, 0), (1, COLD, 0), (0, 1, trials), (1, 1, trials)]
        self._left = deque(  # steps to come: which schedule, and whether it counts
            (which, counts)
            for which, untimed, timed in rows
            for counts in [False] * untimed + [True] * timed
        )

    @property
    def second(self) -> bool:
        """Whether the next step is to follow the second schedule."""
        if self.costs is not None:
            return self.costs[1] < (1 - GAIN) * self.costs[0]
        return self.is_over or self._left[0][0] == 1

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
        which, counts = self._left[0]
        last, self._last = self._last, mark(self._device)
        if counts and last is None:
            return None  # other work ran in it: another step takes its place
        self._left.popleft()
        if counts and last is not None:
            self._spans[which].append((last, self._last))
        return None if self._left else self._medians()

    def interrupt(self) -> None:
        """Leave out the step under way, in which other work ran."""
        self._last = None

    def _medians(self) -> list[float]:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # once a run
        return [median(seconds(*span) for span in spans) for spans in self._spans]
