"""The places of a map: models, links and batches at which strategies were measured alike."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from lab.analysis.leaders import Times, leaders_of
from lab.analysis.records import Cell
from lab.analysis.speedup import CEILING
from lab.cluster.settings import RATE, bits_per_s
from lab.draw.looks import order
from lab.measure.intervals import UNKNOWN, Interval, geometric_mean, of_ratio

REFERENCE = "overlap"  # exact, and what a trainer does without further thought
Row = tuple[str, int]  # of a map: model, and global batch
ADAPTIVE = ("auto",)  # chooses among others as it runs, so it is judged by the best of those


@dataclass(frozen=True)
class Where:
    """A place of the map.

    Attributes:
        model: name of its profile if it is replayed, and by which of its settings runs differ.
        links: as Cell.circumstances: the settings of links, and others by which runs differ.
        batch_size: global.
    """

    model: str
    links: str
    world_size: int
    batch_size: int


@dataclass(frozen=True)
class Lead:
    """The fastest fixed strategy of a place.

    Attributes:
        others: those that cannot be told apart from it.
        factor: step of REFERENCE over its step; NaN if that was not measured.
    """

    name: str
    others: tuple[str, ...]
    factor: Interval


@dataclass(frozen=True)
class Place:
    """The step times that were measured at a place, in seconds by strategy and repeat or turn.

    A strategy that was measured with several settings is as many: `priority sync.chunk_mb=4`.
    """

    where: Where
    steps_s: Mapping[str, Times]

    def fixed(self) -> dict[str, Times]:
        """Return the strategies that may lead: all that train a common model one way."""
        return {k: v for k, v in self.steps_s.items() if k not in (CEILING, *ADAPTIVE)}

    def fastest(self) -> str:
        """Name the fixed strategy of the shortest step, by geometric means."""
        fixed = self.fixed()
        return min(fixed, key=lambda name: geometric_mean(list(fixed[name].values())))

    def lead(self, floor: float) -> Lead:
        """Find the fastest fixed strategy, and those that it was not shown to beat.

        Args:
            floor: see lab.analysis.noise; NaN if unknown.
        """
        name = self.fastest()
        others = tuple(each for each in leaders_of(self.fixed(), floor) if each != name)
        return Lead(name, others, self.ratio(REFERENCE, name))

    def ratio(self, slow: str, fast: str) -> Interval:
        """Compute the ratio of two strategies' steps, in pairs; NaN without any."""
        a, b = (self.steps_s.get(name, {}) for name in (slow, fast))
        shared = [key for key in a if key in b]
        return of_ratio([a[r] for r in shared], [b[r] for r in shared])

    def exposed_ratio(self, one: str, other: str, least: float) -> Interval:
        """Compute the ratio of two strategies' exposed exchange: step less that of none.

        Args:
            least: share of the other's step that its exposed exchange must exceed: a smaller one
                is noise.

        Returns:
            All NaN where it is noise, or was not measured.
        """
        alone, a, b = (self.steps_s.get(name, {}) for name in (CEILING, one, other))
        shared = [key for key in alone if key in a and key in b]
        first, second = ([each[r] - alone[r] for r in shared] for each in (a, b))
        is_noise = sum(second) <= least * sum(b[r] for r in shared)
        return UNKNOWN if is_noise or min(*first, *second) <= 0 else of_ratio(first, second)


def places_of(cells: Iterable[Cell]) -> list[Place]:
    """Collect the places at which several fixed strategies were measured, with any exchange.

    Runs with a transform train another model, and weak scaling has other batches on other numbers
    of ranks: both are left out.
    """
    found: defaultdict[Where, dict[str, dict[Hashable, float]]] = defaultdict(dict)
    counted = [cell for cell in cells if _counts(cell)]
    for cell in sorted(counted, key=lambda cell: order(cell.series)):
        found[_where(cell)].setdefault(cell.series, {}).update(cell.paired_s)
    places = (Place(where, _named(steps_s)) for where, steps_s in found.items())
    return [place for place in places if len(place.fixed()) > 1]


def _counts(cell: Cell) -> bool:
    timed = cell.status == "done" and cell.measure == "throughput" and cell.world_size > 1
    alike = cell.scaling == "strong" and not cell.transform
    return timed and alike and not math.isnan(cell.step_s)


def _where(cell: Cell) -> Where:
    scaled = [f"{k}={v}" for k, v in cell.conditions.items() if k.startswith("model.")]
    model = cell.profile or cell.settings.get("model", "")
    return Where(" ".join([model, *scaled]), cell.circumstances, cell.world_size, cell.batch_size)


def _named(steps_s: Mapping[str, Times]) -> dict[str, Times]:
    """Name each series by its strategy, and only where one has several, by all."""
    strategies = [series.split(" ")[0] for series in steps_s]
    names = {
        series: strategy if strategies.count(strategy) == 1 else series
        for series, strategy in zip(steps_s, strategies, strict=True)
    }
    return {names[series]: times for series, times in steps_s.items()}


def on_most_ranks(places: Iterable[Place]) -> list[Place]:
    """Keep the places of the largest number of ranks: a map has one."""
    known = list(places)
    most = max((place.where.world_size for place in known), default=0)
    return [place for place in known if place.where.world_size == most]


def rows_of(leads: Iterable[Where]) -> list[Row]:
    """List the rows of a map from top to bottom."""
    return sorted({(where.model, where.batch_size) for where in leads})


def columns_of(leads: Iterable[Where]) -> list[str]:
    """List the links of a map, slow ones first."""
    return sorted({where.links for where in leads}, key=lambda links: (_rate(links), links))


def _rate(links: str) -> float:
    found = RATE.search(links)
    return bits_per_s(found[0]) if found else math.inf
