"""Compute the speedups in a paper's figures: by cell, by link rate, by ranks and batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lab.claims.claims import Paper, Reproduction
from lab.claims.metrics import Facts, MeasuredFacts, Missing, Point, speedup
from lab.claims.predicted import Predicted
from lab.simulate.crossover import slowest

RATES = tuple(10 ** (power / 10) for power in range(70, 116))  # bytes per second
MAP_RANKS = tuple(2**power for power in range(1, 9))
MAP_BATCHES = tuple(2**power for power in range(6, 16))


@dataclass(frozen=True)
class CellSpeedup:
    """Speedup of a cell over one rank; NaN where it is unknown.

    Attributes:
        repeats: measured values of the repeats that are known.
        published: figures of claims about this cell.
    """

    at: Point
    predicted: float
    measured: float
    repeats: tuple[float, ...]
    published: tuple[float, ...]


@dataclass(frozen=True)
class RateSpeedups:
    """Predicted speedup over the rate of the links.

    Attributes:
        basis: the profile and the hardware.
        rates: in bytes per second.
        own_rate: rate of the hardware's own links.
        values: by global batch and strategy, the speedup at each of `rates`; NaN if unknown.
    """

    basis: str
    world_size: int
    rates: tuple[float, ...]
    own_rate: float
    values: Mapping[int, Mapping[str, tuple[float, ...]]]


@dataclass(frozen=True)
class SpeedupMap:
    """Predicted speedup over ranks and global batch.

    Attributes:
        basis: the profile and the hardware.
        values: by strategy, indexed [batch][ranks]; NaN if unknown.
    """

    basis: str
    ranks: tuple[int, ...]
    batches: tuple[int, ...]
    values: Mapping[str, tuple[tuple[float, ...], ...]]


def cell_speedups(
    paper: Paper, grid: Reproduction, predicted: Facts, measured: MeasuredFacts | None
) -> tuple[CellSpeedup, ...]:
    """Compute the speedup of every cell of `grid`."""
    repeats = measured.repeats() if measured else ()
    points = [
        Point(strategy, world_size, batch)
        for strategy in grid.strategies
        for batch in grid.batch_sizes
        for world_size in grid.world_sizes
    ]
    return tuple(
        CellSpeedup(
            at,
            _speedup(predicted, at),
            _speedup(measured, at) if measured else math.nan,
            tuple(v for each in repeats if math.isfinite(v := _speedup(each, at))),
            _published(paper, at),
        )
        for at in points
    )


def rate_speedups(grid: Reproduction, predicted: Predicted) -> RateSpeedups:
    """Predict the speedup of the largest world size of `grid` for links of any rate."""
    world_size = max(grid.world_sizes)
    facts = [predicted.at_rate(rate) for rate in RATES]
    values = {
        batch: {
            name: tuple(_speedup(each, Point(name, world_size, batch)) for each in facts)
            for name in grid.strategies
        }
        for batch in grid.batch_sizes
    }
    own_rate = slowest(predicted.hardware).bandwidth_bytes_per_s
    return RateSpeedups(str(predicted), world_size, RATES, own_rate, values)


def speedup_map(grid: Reproduction, predicted: Predicted) -> SpeedupMap:
    """Predict the speedup of each strategy of `grid` for any number of ranks and any batch."""
    values = {
        name: tuple(
            tuple(_speedup(predicted, Point(name, ranks, batch)) for ranks in MAP_RANKS)
            for batch in MAP_BATCHES
        )
        for name in grid.strategies
    }
    return SpeedupMap(str(predicted), MAP_RANKS, MAP_BATCHES, values)


def _published(paper: Paper, at: Point) -> tuple[float, ...]:
    claims = (claim for claim in paper.claims if (claim.quantity, claim.at) == ("speedup", at))
    return tuple(claim.published for claim in claims if claim.published is not None)


def _speedup(facts: Facts, at: Point) -> float:
    try:
        return speedup(facts, at)
    except Missing:
        return math.nan
