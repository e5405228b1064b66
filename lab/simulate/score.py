"""Score predictions on the measured cells of a study: whole steps, and the exchange in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from lab.simulate.fit import Group, Observation
from lab.simulate.strategy import CEILING

NONE = "none"


@dataclass(frozen=True)
class ScoredCell:
    """A measured cell and its prediction.

    Attributes:
        batch_size: global.
        measured_s: step time of each repeat.
        predicted_s: step time.
        alone_s: step time without any exchange on as many ranks: measured (NaN if it was not)
            and predicted.
        evidence: "fitted" if the model was fitted to this cell, "held out" if not.
        overlaps: exchanges run while the rank computes.
        conditions: as in Group.
    """

    strategy: str
    profile: str
    world_size: int
    batch_size: int
    measured_s: tuple[float, ...]
    predicted_s: float
    alone_s: tuple[float, float]
    evidence: str
    overlaps: bool
    conditions: str

    @property
    def error(self) -> float:
        """Relative error of the predicted step against the median of the repeats."""
        return self.predicted_s / median(self.measured_s) - 1

    @property
    def exposed_s(self) -> tuple[float, float]:
        """Exposed exchange, measured (NaN if unknown) and predicted."""
        return median(self.measured_s) - self.alone_s[0], self.predicted_s - self.alone_s[1]

    @property
    def exposed_error(self) -> float:
        """Relative error of the predicted exposed exchange; NaN where none was measured."""
        measured, predicted = self.exposed_s
        return predicted / measured - 1 if measured > 0 else math.nan


@dataclass(frozen=True)
class Score:
    """Errors over cells, in absolute value except `signed_error`; NaN without a cell.

    Attributes:
        step, exposed: median and worst error of the step time and of the exposed exchange.
        signed_error: mean error of the steps of strategies that overlap.
        num_exposed: how many cells have a score of their exposed exchange.
    """

    num_cells: int
    step: tuple[float, float]
    exposed: tuple[float, float]
    num_exposed: int
    signed_error: float

    def __str__(self) -> str:
        text = f"{self.num_cells} cells without none, step time {_percent(self.step)}"
        if self.num_exposed:
            exposed = f"exposed exchange {_percent(self.exposed)}"
            text += f"; {exposed} ({self.num_exposed} cells)"
        if not math.isnan(self.signed_error):
            text += f"; overlapped steps {100 * self.signed_error:+.1f} % on average"
        return text


def scored_cells(group: Group) -> tuple[ScoredCell, ...]:
    """Predict every observed cell by the group's hardware."""
    return tuple(scored_cell(group, cell) for cell in group.observations)


def scored_cell(group: Group, cell: Observation) -> ScoredCell:
    """Predict an observed cell by the hardware of its group."""
    alone = group.observed(cell.profile, NONE, cell.world_size, cell.per_rank_batch_size)
    return ScoredCell(
        strategy=cell.name,
        profile=cell.profile.name,
        world_size=cell.world_size,
        batch_size=cell.world_size * cell.per_rank_batch_size,
        measured_s=cell.steps_s,
        predicted_s=cell.predicted_s(group.hardware),
        alone_s=(alone.step_s if alone else math.nan, cell.predicted_s(group.hardware, CEILING)),
        evidence=group.evidence(cell),
        overlaps=cell.strategy.pattern.overlaps,
        conditions=group.conditions,
    )


def held_out(cells: Iterable[ScoredCell]) -> list[ScoredCell]:
    """Return the cells that score the model: not fitted, and with an exchange."""
    return [c for c in cells if c.evidence == "held out" and c.strategy != NONE]


def with_exposed(cells: Iterable[ScoredCell], least_exposed: float) -> list[ScoredCell]:
    """Return the cells whose exposed exchange is scored.

    Args:
        least_exposed: share of the step that it was measured to exceed: below the noise floor its
            relative error says nothing.
    """
    return [c for c in cells if c.exposed_s[0] > least_exposed * median(c.measured_s)]


def score(cells: Sequence[ScoredCell], least_exposed: float = 0.0) -> Score:
    """Summarise the errors of some cells.

    Args:
        least_exposed: see `with_exposed`.
    """
    exposed = [abs(cell.exposed_error) for cell in with_exposed(cells, least_exposed)]
    signed = [cell.error for cell in cells if cell.overlaps]
    steps = [abs(cell.error) for cell in cells]
    return Score(
        num_cells=len(cells),
        step=_middle_and_worst(steps),
        exposed=_middle_and_worst(exposed),
        num_exposed=len(exposed),
        signed_error=mean(signed) if signed else math.nan,
    )


def _middle_and_worst(errors: Sequence[float]) -> tuple[float, float]:
    return (median(errors), max(errors)) if errors else (math.nan, math.nan)


def _percent(errors: tuple[float, float]) -> str:
    return f"median error {100 * errors[0]:.1f} %, worst {100 * errors[1]:.1f} %"
