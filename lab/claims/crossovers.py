"""Search where the strategies of a reproduction begin to pay: over batches and link rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.claims.claims import Reproduction
from lab.claims.predicted import Predicted, profile_of, strategy_of
from lab.simulate.crossover import MARGIN, crossover_batch, crossover_rate


@dataclass(frozen=True)
class Crossovers:
    """Points where one way of training overtakes another, as predicted.

    Attributes:
        basis: the profile and the hardware.
        world_size: of all points.
        batch: by strategy, the smallest global batch that is trained faster than on one rank;
            None if there is none.
        pair: the strategies that `rate` compares; None if the paper names none.
        margin: by how much the first of the pair must be faster: 1.05 is 5 %.
        rate: by global batch, the rate of the links in bytes per second below which the first of
            the pair is faster; None if there is none.
    """

    basis: str
    world_size: int
    batch: Mapping[str, int | None]
    pair: tuple[str, str] | None
    margin: float
    rate: Mapping[int, float | None]


def find_crossovers(grid: Reproduction, predicted: Predicted) -> Crossovers:
    """Search the crossovers of the largest world size of `grid`."""
    profile = profile_of(predicted.profile, predicted.bytes_scale)
    hardware, world_size = predicted.hardware, max(grid.world_sizes)
    batch = {
        name: crossover_batch(profile, hardware, strategy_of(name), world_size)
        for name in grid.strategies
    }
    rate: dict[int, float | None] = {}
    if grid.rate_crossover:
        first, second = map(strategy_of, grid.rate_crossover)
        rate = {
            size: crossover_rate(profile, hardware, (first, second), world_size, size)
            for size in grid.batch_sizes
        }
    return Crossovers(str(predicted), world_size, batch, grid.rate_crossover, MARGIN, rate)
