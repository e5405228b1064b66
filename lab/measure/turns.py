"""Turns: several runs of one start train in turns, so that drift of the machine favours none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Turns:
    """The steps of a run that takes turns with others.

    The first round of a turn does not count: nothing of its own is under way, and caches hold what
    others left there.

    Attributes:
        alone: first steps, all of warm-up, made before turns begin.
        size: steps of each turn.
        every: steps of a round, from one exchange to the next.
    """

    alone: int
    size: int
    every: int

    def counted(self, num_steps: int) -> NDArray[np.bool_]:
        """Tell which of a run's steps count, [steps]."""
        place = np.arange(num_steps) - self.alone
        return (place >= 0) & (place % self.size >= self.every)

    def seconds(self, round_s: NDArray[np.float64]) -> list[float]:
        """Compute a step's seconds in each turn: the median over its rounds that count.

        Args:
            round_s: mean of a step on each rank, [ranks, rounds that count].
        """
        slowest = round_s.max(axis=0)
        return np.median(slowest.reshape(-1, self.size // self.every - 1), axis=1).tolist()


def order(num_candidates: int, round_number: int) -> list[int]:
    """Draw the order of a round, the same on all ranks.

    The order differs between rounds, so that no candidate always runs first or after the same one.
    """
    return np.random.default_rng(round_number).permutation(num_candidates).tolist()
