"""Which of several configurations of a step is the fastest, found in few steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

SLACK = 1.25  # by which a prediction may err
FIRST = 2  # timed steps of a visit in the first round: one of them may be a stall
COLD = 2  # steps that do not count in a visit of the first round: memory is allocated
NEAR = 0.1  # of the fastest: who is within may still win
NUM_FASTEST = 5, 3  # that go on after the first round, and after later ones


class Contest:
    """Rounds in which configurations take turns, until one is chosen.

    A visit of round r is a step that does not count, as it begins with what the last configuration
    left (two in round 1, where it is cold), and r + 1 steps that do. Round 1 has all, by their
    predictions, but those whose exchange would outlast a whole step of the fastest so far, whatever
    overlaps. Later ones have the fastest, and the first of those near it, in the opposite order
    than the round before.

    It knows no clock and no ranks: whoever runs the steps tells the same seconds on all ranks.

    Args:
        predicted: seconds of each configuration's exchange without any overlap. Configurations come
            in order of preference.
        least: seconds of it if all overlaps that can.
        rounds: how many, at most.
        tolerance: share of a step by which a preferred one may be slower.

    Attributes:
        current: place of the configuration that runs.
        num_untimed, num_timed: its first steps in this visit, and then those that count.
        winner: place of the chosen one; None: not known yet.
    """

    def __init__(
        self, predicted: Sequence[float], least: Sequence[float], rounds: int, tolerance: float
    ) -> None:
        self._predicted, self._least = list(predicted), list(least)
        self._rounds, self._tolerance = rounds, tolerance
        self._seconds: list[list[float]] = [[] for _ in predicted]
        self._left = set(range(len(predicted)))  # those of this round
        self._waiting = sorted(self._left, key=self._predicted.__getitem__)
        self.current = self._waiting.pop(0)
        self.num_untimed, self.num_timed = COLD, FIRST
        self.winner: int | None = None

    def end_visit(self, seconds: Sequence[float]) -> None:
        """Take the times of the visit's steps that count, and go on to the next visit."""
        self._seconds[self.current] += seconds
        if self.num_timed == FIRST:
            limit = SLACK * min(self.medians().values())
            self._waiting = [each for each in self._waiting if self._least[each] <= limit]
        if not self._waiting:
            self._begin_round()
        if self._waiting:
            self.current = self._waiting.pop(0)

    def stop(self) -> None:
        """Choose by what is known: whole steps, or predictions if there are none."""
        known = self._of_round() or dict(enumerate(self._predicted))
        self.winner = preferred(known, self._tolerance)

    def medians(self) -> dict[int, float]:
        """Return the (low) median seconds of a step, by place, of those that had one."""
        return {at: median_low(times) for at, times in enumerate(self._seconds) if times}

    def _of_round(self) -> dict[int, float]:
        return {at: time for at, time in self.medians().items() if at in self._left}

    def _begin_round(self) -> None:
        known = self._of_round()
        near = {at: time for at, time in known.items() if time <= (1 + NEAR) * min(known.values())}
        num_fastest = NUM_FASTEST[self.num_timed > FIRST]
        fastest = sorted(near, key=near.__getitem__)[:num_fastest]
        self._left = {min(near), *fastest}
        if self.num_timed + 1 == FIRST + self._rounds or len(self._left) == 1:
            self.stop()
            return
        self.num_untimed, self.num_timed = 1, self.num_timed + 1
        backwards = (self.num_timed - FIRST) % 2 == 1
        self._waiting = sorted(self._left, key=self._predicted.__getitem__, reverse=backwards)


def preferred(seconds: dict[int, float], tolerance: float) -> int:
    """Return the first key whose seconds are hardly more than the fewest."""
    limit = (1 + tolerance) * min(seconds.values())
    return next(at for at in sorted(seconds) if seconds[at] <= limit)
