"""Statements over a grid of cells: how often, and by how much, any of some strategies wins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lab.claims.metrics import Facts, Point


@dataclass(frozen=True)
class Grid:
    """Every profile with every number of ranks, per-rank batch and rate of the links.

    Attributes:
        strategies: any of them may win. over: the strategy that they must beat.
        margin: share of its step by which they must be faster.
        rates_gbit: of the links between nodes; None: the hardware's.
    """

    strategies: tuple[str, ...]
    profiles: tuple[str, ...]
    world_sizes: tuple[int, ...]
    per_rank_batch_sizes: tuple[int, ...]
    over: str = "overlap"
    margin: float = 0.05
    rates_gbit: tuple[float | None, ...] = (None,)

    def __post_init__(self) -> None:
        axes = ("strategies", "profiles", "world_sizes", "per_rank_batch_sizes", "rates_gbit")
        for key in axes:
            if not (isinstance(value := getattr(self, key), tuple) and value):
                raise ValueError(f"grid.{key}={value}: must be a list with an entry")
        if not self.margin >= 0:
            raise ValueError(f"grid.margin={self.margin}: must not be negative")
        for _ in self.cells:
            pass  # each point is checked as it is made

    @property
    def cells(self) -> Iterator[Point]:
        """Yield each cell, with the strategy to beat."""
        axes = (self.profiles, self.world_sizes, self.per_rank_batch_sizes, self.rates_gbit)
        for profile, size, batch, rate in itertools.product(*axes):
            yield Point(self.over, size, size * batch, profile, rate_gbit=rate)

    def gains(self, facts: Facts) -> list[float]:
        """Divide the step of `over` by the fastest strategy's, in each cell.

        Raises:
            Missing: a cell is not known.
        """
        return [
            facts.step_s(cell)
            / min(facts.step_s(replace(cell, strategy=name)) for name in self.strategies)
            for cell in self.cells
        ]

    def is_won(self, gain: float) -> bool:
        """Return whether a strategy that is faster by the factor `gain` beats `over`."""
        return gain > 1 + self.margin


def win_share(facts: Facts, grid: Grid) -> float:
    """Return the share of cells in which any strategy wins."""
    gains = grid.gains(facts)
    return sum(map(grid.is_won, gains)) / len(gains)


def best_gain(facts: Facts, grid: Grid) -> float:
    """Return the largest gain of any strategy in any cell: what "up to" and "as much as" say."""
    return max(grid.gains(facts))


OVER_GRID: dict[str, Callable[[Facts, Grid], float]] = {
    "win_share": win_share,
    "best_gain": best_gain,
}
