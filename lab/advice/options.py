"""Options: the cells of a request, predicted, with their memory, limit and knee."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lab.advice.forecast import Forecast, steps_on
from lab.advice.limits import limit
from lab.advice.request import Advice
from lab.simulate.fit import Group
from lab.simulate.grid import series_of, sources_of, strategy_of
from lab.simulate.memory import rank_bytes
from lab.simulate.request import plain
from lab.simulate.source import Source
from lab.simulate.step import predict
from lab.study.grid import Cell


@dataclass(frozen=True)
class Option:
    """A cell that may be chosen.

    Attributes:
        forecast: its predicted steps; its name is the series'.
        memory_bytes: of the rank that needs most, without activations; NaN: unknown.
        limit: name and share, as lab.advice.limits finds them.
        knee: the ranks from which twice as many gain too little; None: there is no such number
            among the cells.
    """

    cell: Cell
    forecast: Forecast
    efficiency: float
    memory_bytes: float
    limit: tuple[str, float]
    knee: int | None = None

    @property
    def samples_per_s(self) -> float:
        return 1 / self.forecast.seconds_per_sample


def options_of(advice: Advice, group: Group) -> list[Option]:
    """Predict the cells of a request on a group's hardware.

    Raises:
        ValueError: a strategy has no cost model, or the hardware has too few ranks.
    """
    request = advice.prediction
    found = [
        _option(advice, group, cell, source)
        for cell, source in zip(request.cells, sources_of(request), strict=True)
    ]
    return [replace(option, knee=_knee(option, found, advice.knee)) for option in found]


def fitting(options: Iterable[Option], memory_bytes: float | None) -> list[Option]:
    """Return the options that fit a device's memory, as far as both are known."""
    return [o for o in options if not memory_bytes or not o.memory_bytes > memory_bytes]


def _option(advice: Advice, group: Group, cell: Cell, source: Source) -> Option:
    strategy, size = strategy_of(cell, source), cell.world_size
    weak, per_rank = cell.config.scaling == "weak", cell.batch_size // size
    hardware = group.hardware
    profile = source.on(hardware)
    steps_s = steps_on(group, source, strategy, size, per_rank)
    weight = advice.target.weight(size, hardware.ranks_per_node)
    name = series_of(cell, advice.prediction.cells)
    return Option(
        cell,
        Forecast(name, strategy.lossy, cell.batch_size, weight, steps_s),
        predict(profile, hardware, strategy, size, cell.batch_size, weak).efficiency,
        rank_bytes(profile, strategy, plain(cell.config), size, hardware),
        limit(profile, hardware, strategy, size, per_rank),
    )


def _knee(option: Option, options: Sequence[Option], least_gain: float) -> int | None:
    """Return the smallest number of ranks of an option's series that should not be doubled."""
    rates = {
        one.cell.world_size: one.samples_per_s
        for one in options
        if one.cell.arguments == option.cell.arguments
    }
    knees = (n for n in sorted(rates) if 2 * n in rates and rates[2 * n] < least_gain * rates[n])
    return next(knees, None)
