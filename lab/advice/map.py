"""The map of strategies, predicted and measured: which is the fastest at each place of a study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.advice.forecast import Forecast, contenders, ranked, steps_on
from lab.advice.score import scenarios
from lab.analysis.places import REFERENCE, Lead, Place, Where
from lab.analysis.verdict import Summary, summaries
from lab.measure.intervals import UNKNOWN, Interval
from lab.simulate.fit import Group, Observation
from lab.simulate.source import Measured


@dataclass(frozen=True)
class Answer:
    """The lead at a place, as measured and as predicted.

    Attributes:
        predicted: its `others` are those that advice cannot tell apart, and its `factor` has the
            interval of the draws.
    """

    place: Place
    measured: Lead
    predicted: Lead

    @property
    def is_best(self) -> bool:
        """The predicted strategy was measured fastest."""
        return self.predicted.name == self.measured.name

    @property
    def agrees(self) -> bool:
        """It was measured fastest, or could not be told apart from what was."""
        return self.is_best or self.predicted.name in self.measured.others

    @property
    def regret(self) -> Interval:
        """Its measured step over that of the fastest one."""
        return self.place.ratio(self.predicted.name, self.measured.name)


@dataclass(frozen=True)
class Map:
    """The places of a study whose cells were held out, and what follows from them.

    Attributes:
        summaries: see lab.analysis.verdict.
    """

    answers: tuple[Answer, ...]
    floor: float
    summaries: dict[str, Summary]


def map_of(places: Sequence[Place], groups: Iterable[Group], floor: float) -> Map:
    """Predict the fastest strategy of each place by hardware that was not fitted to it.

    Args:
        places: of the study that the groups were read from.
        floor: its noise floor; NaN if unknown.
    """
    cells = {
        _where(group, cells[0]): (group, cells) for group in groups for cells in scenarios(group)
    }
    answers = []
    for place in places:
        group, observed = cells.get(place.where, (None, []))
        comparable = _comparable(place, observed)
        if group and len(comparable) > 1:
            answers.append(Answer(place, place.lead(floor), _predicted(group, comparable)))
    return Map(tuple(answers), floor, summaries([one.place for one in answers], floor))


def _where(group: Group, cell: Observation) -> Where:
    batch_size = cell.world_size * cell.per_rank_batch_size
    return Where(cell.profile.name, group.conditions, cell.world_size, batch_size)


def _comparable(place: Place, cells: Sequence[Observation]) -> list[Observation]:
    """Keep the fixed strategies that were measured with one setting."""
    counts = Counter(cell.name for cell in cells)
    return [cell for cell in cells if cell.name in place.fixed() and counts[cell.name] == 1]


def _predicted(group: Group, cells: Sequence[Observation]) -> Lead:
    forecasts = ranked(_forecast(group, cell) for cell in cells)
    first, others = forecasts[0], contenders(forecasts)
    reference = next((each for each in forecasts if each.name == REFERENCE), None)
    factor = _factor(reference, first) if reference else UNKNOWN
    return Lead(first.name, tuple(other.name for other in others), factor)


def _forecast(group: Group, cell: Observation) -> Forecast:
    point = Measured(cell.profile), cell.strategy, cell.world_size, cell.per_rank_batch_size
    batch_size = cell.world_size * cell.per_rank_batch_size
    return Forecast(cell.name, cell.strategy.lossy, batch_size, 1, steps_on(group, *point))


def _factor(slow: Forecast, fast: Forecast) -> Interval:
    ratios = [a / b for a, b in zip(slow.steps_s, fast.steps_s, strict=True)]
    return Interval(min(ratios), ratios[0], max(ratios))
