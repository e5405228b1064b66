"""Facts of a study that was run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from lab.analysis.records import Cell
from lab.claims.metrics import Facts, Missing, Point
from lab.model.profile import VALUE_BYTES


class Measured:
    """What a study's finished throughput runs tell; of several repeats, the median.

    Args:
        cells: the study's.
        profile: the paper's, which the others stand beside.
        parameters: of the lab's own model, all and those in fully connected layers: counted, for
            cells that replay a scaled one do not tell.
    """

    def __init__(self, cells: Sequence[Cell], profile: str, parameters: tuple[int, int]) -> None:
        self._given = cells, profile, parameters
        self._parameters, self._fc_parameters = parameters
        self._cells: dict[Point, list[Cell]] = {}
        for cell in cells:
            if (cell.status, cell.measure, cell.scaling) == ("done", "throughput", "strong"):
                own = cell.settings.get("profile", profile)
                other = None if own == profile else own
                at = Point(cell.strategy, cell.world_size, cell.batch_size, other)
                self._cells.setdefault(at, []).append(cell)

    def repeats(self) -> Sequence[Facts]:
        """What each repeat tells by itself."""
        cells, profile, parameters = self._given
        numbers = sorted({cell.repeat for cell in cells})
        apart = [[cell for cell in cells if cell.repeat == number] for number in numbers]
        return [Measured(each, profile, parameters) for each in apart]

    def step_s(self, at: Point) -> float:
        """Seconds of a step: the median over steps of the slowest rank."""
        return self._median(at, lambda cell: cell.step_s)

    def payload_bytes(self, at: Point) -> float:
        """What the busiest rank handed to the network in a step."""
        return self._median(at, lambda cell: max(cell.payload_bytes_per_step, default=math.nan))

    def gradient_bytes(self) -> float:
        """Of the lab's own model."""
        return VALUE_BYTES * self._parameters

    def fc_share(self) -> float:
        """Of its parameters, those in fully connected layers."""
        return self._fc_parameters / self._parameters

    def conv2_operations(self, batch_size: int) -> float:
        """Nobody has counted them."""
        raise Missing

    def emulations(self) -> list[str]:
        """In which ways these runs are not what they stand for."""
        cells = (cell for each in self._cells.values() for cell in each)
        return sorted({one.detail for cell in cells for one in cell.emulation})

    def machines(self) -> list[str]:
        """On what they ran."""
        known = [c.environment for cells in self._cells.values() for c in cells if c.environment]
        return sorted({f"{e['cpu']}, {e['num_cores']} cores, torch {e['torch']}" for e in known})

    def _median(self, at: Point, value: Callable[[Cell], float]) -> float:
        found = [value(cell) for cell in self._cells.get(at, ())]
        finite = [one for one in found if math.isfinite(one)]
        if not finite:
            raise Missing
        return statistics.median(finite)
