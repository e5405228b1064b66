"""Predicted step times of options, on hardware and on each draw of what it leaves open; ranking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.simulate.fit import Group
from lab.simulate.presets import places
from lab.simulate.source import Source
from lab.simulate.step import simulate
from lab.simulate.strategy import Strategy

# Steps of held-out cells are predicted within 3.6 % in the median (docs/results/links.md), which no
# interval of an option includes: options closer than this are not told apart.
MODEL_ERROR = 0.05


@dataclass(frozen=True)
class Forecast:
    """The predicted steps of one option.

    Attributes:
        name: of the option among those that it competes with, as a strategy's.
        lossy: see lab.simulate.step.Strategy.
        weight: what a second of its time counts (see Target.weight).
        steps_s: the predicted step time, then that on each draw. The draws are the same for all
            options of a group.
    """

    name: str
    lossy: bool
    batch_size: int
    weight: float
    steps_s: tuple[float, ...]

    @property
    def seconds_per_sample(self) -> float:
        return self.steps_s[0] / self.batch_size

    @property
    def interval_s(self) -> tuple[float, float]:
        """The shortest and the longest of the step times."""
        return min(self.steps_s), max(self.steps_s)

    def costs(self) -> list[float]:
        """Return weighted seconds per sample, on the hardware and on each draw."""
        return [self.weight * step_s / self.batch_size for step_s in self.steps_s]


def steps_on(
    group: Group, source: Source, strategy: Strategy, world_size: int, per_rank_batch_size: int
) -> tuple[float, ...]:
    """Predict a step on a group's hardware, and on each of its draws.

    Raises:
        ValueError: the hardware has too few ranks.
    """
    drawn = zip(places(len(group.draws)), group.draws, strict=True)
    machines = [
        (source.on(group.hardware), group.hardware),
        *((source.on(each).drawn(place), each) for place, each in drawn),
    ]
    point = strategy, world_size, per_rank_batch_size
    return tuple(simulate(model, hardware, *point).step_s for model, hardware in machines)


def ranked(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Return the forecasts, the cheapest first."""
    return sorted(forecasts, key=lambda forecast: forecast.costs()[0])


def contenders(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return those of ranked forecasts that cannot be told apart from the first one.

    Both meet the same draws, so what they have in common cancels. An option is told apart if it is
    dearer on every draw, and by more than MODEL_ERROR as predicted.
    """
    first, *others = forecasts
    return [other for other in others if not _is_dearer(other, first)]


def _is_dearer(other: Forecast, first: Forecast) -> bool:
    ratios = [one / best for one, best in zip(other.costs(), first.costs(), strict=True)]
    return min(ratios) > 1 and ratios[0] > 1 + MODEL_ERROR
