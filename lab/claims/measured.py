"""Measure facts (lab.claims.metrics) from the runs of a study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from lab.analysis.records import Cell, commits_of
from lab.claims.metrics import Facts, Missing, Point
from lab.model.facts import Counts


class Measured:
    """Facts from finished throughput runs with strong scaling: the median of their repeats.

    Args:
        cells: all cells of the study.
        profile: the paper's.
        counts: of the paper's network, because cells replay a scaled one.
    """

    def __init__(self, cells: Sequence[Cell], profile: str, counts: Counts) -> None:
        self._all_cells, self._profile, self._counts = cells, profile, counts
        self._cells: dict[Point, list[Cell]] = {}
        for cell in cells:
            if (cell.status, cell.measure, cell.scaling) == ("done", "throughput", "strong"):
                replayed = cell.settings.get("profile", profile)
                other = None if replayed == profile else replayed
                at = Point(cell.strategy, cell.world_size, cell.batch_size, other)
                self._cells.setdefault(at, []).append(cell)

    def repeats(self) -> Sequence[Facts]:
        """Return the facts of each single repeat."""
        by_repeat: dict[int, list[Cell]] = {}
        for cell in self._all_cells:
            by_repeat.setdefault(cell.repeat, []).append(cell)
        return [
            Measured(by_repeat[repeat], self._profile, self._counts) for repeat in sorted(by_repeat)
        ]

    def step_s(self, at: Point) -> float:
        """Return the seconds of a step: the median over steps of the slowest rank."""
        return self._median(at, lambda cell: cell.step_s)

    def payload_bytes(self, at: Point) -> float:
        """Return the bytes that the busiest rank handed to the network in a step."""
        return self._median(at, lambda cell: max(cell.payload_bytes_per_step, default=math.nan))

    def counts(self) -> Counts:
        """Return the counts of the paper's network."""
        return self._counts

    def emulations(self) -> list[str]:
        """List the emulations of the runs, sorted; empty if there were none."""
        cells = (cell for each in self._cells.values() for cell in each)
        return sorted({one.detail for cell in cells for one in cell.emulation})

    def machines(self) -> list[str]:
        """List the machines of the runs, sorted."""
        known = [c.environment for cells in self._cells.values() for c in cells if c.environment]
        return sorted({f"{e['cpu']}, {e['num_cores']} cores, torch {e['torch']}" for e in known})

    def commits(self) -> tuple[str, ...]:
        """List the lab's commits that measured the runs; empty if one is not known."""
        return commits_of(self._all_cells)

    def _median(self, at: Point, value: Callable[[Cell], float]) -> float:
        values = [value(cell) for cell in self._cells.get(at, ())]
        finite = [one for one in values if math.isfinite(one)]
        if not finite:
            raise Missing
        return statistics.median(finite)
