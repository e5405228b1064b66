"""Observed cells, the hardware that predicts them, and scores of these predictions.

A score is of whole steps, and of the exchange in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from lab.draw.text import number_of
from lab.model.profile import Profile
from lab.settings.names import root_of
from lab.simulate.hardware import Hardware
from lab.simulate.step import simulate
from lab.simulate.strategy import Strategy

if TYPE_CHECKING:
    from lab.record.schema import Record
    from lab.study.grid import Cell

LARGEST_FITTED = 2  # ranks; more are held out, to score predictions
NONE = "none"
# Settings that decide what a step computes and exchanges; a profile says nothing of it.
ROOTS = (
    *("model", "data", "task", "transform", "exchange", "sync", "overlap", "bucket_mb"),
    *("precision", "tf32", "channels_last", "compile"),
)


def skill(error: float, of_null: float) -> float:
    """Return how much of the error of a null model is gone.

    Args:
        error, of_null: of the same kind over the same figures, such as medians. The null model of
            predictions is linear scaling, that N ranks are N times as fast.

    Returns:
        1 - error / of_null: 1 is perfect, 0 no better, negative worse; NaN where the null model has
        no error, or none is known.
    """
    return 1 - error / of_null if of_null else math.nan


@dataclass(frozen=True)
class Observation:
    """Cells that differ only in their repeat.

    Attributes:
        name: the strategy's name in the study.
        steps_s: step time of each repeat.
    """

    name: str
    profile: Profile
    strategy: Strategy
    world_size: int
    per_rank_batch_size: int
    steps_s: tuple[float, ...]

    @property
    def batch_size(self) -> int:
        """Samples of a step on all ranks."""
        return self.world_size * self.per_rank_batch_size

    @property
    def step_s(self) -> float:
        """The median over repeats."""
        return median(self.steps_s)

    def predicted_s(self, hardware: Hardware, strategy: Strategy | None = None) -> float:
        """Predict the step time of these cells, or of another strategy in their place."""
        point = strategy or self.strategy, self.world_size, self.per_rank_batch_size
        return simulate(self.profile, hardware, *point).step_s


@dataclass(frozen=True)
class Group:
    """The cells of a study that share machine and links, and the hardware to predict them on.

    Attributes:
        conditions: the settings by which the study's groups differ; empty if there is one group.
        hardware: fitted to the cells of one and two ranks, of this group or of another.
        draws: the same hardware with values drawn from what the fit and the preset leave open.
        fitted: the hardware was fitted to this group.
    """

    conditions: str
    observations: tuple[Observation, ...]
    hardware: Hardware
    draws: tuple[Hardware, ...] = ()
    fitted: bool = True

    def evidence(self, cell: Observation) -> str:
        """Return the kind of evidence that a cell gives."""
        return "fitted" if self.fitted and cell in used_by_fit(self.observations) else "held out"

    def observed(
        self, profile: Profile, strategy: Strategy | str, world_size: int, per_rank_batch_size: int
    ) -> Observation | None:
        """Find the cells of a point; a strategy is given by its name in the study, or itself."""
        point = profile, world_size, per_rank_batch_size
        found = (
            one
            for one in self.observations
            if strategy in (one.name, one.strategy)
            and (one.profile, one.world_size, one.per_rank_batch_size) == point
        )
        return next(found, None)


def used_by_fit(cells: Sequence[Observation]) -> list[Observation]:
    """Return the cells of at most two ranks, without FSDP2's if there are others of two.

    FSDP2's schedule is torch's, and its model is the coarsest: it would bend what all cells share.
    """
    few = [cell for cell in cells if cell.world_size <= LARGEST_FITTED]
    own = [cell for cell in few if not cell.strategy.pattern.gathers_units]
    sending = [cell for cell in own if cell.strategy.exchanges]
    return own if any(cell.world_size == LARGEST_FITTED for cell in sending) else few


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
        linear_s: step time if N ranks are N times as fast as one without any exchange, the null
            model: measured, or else predicted.
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
    linear_s: float = math.nan

    @property
    def linear_error(self) -> float:
        """Relative error of the null model's step."""
        return self.linear_s / median(self.measured_s) - 1

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
        linear: median and worst error of the step if N ranks are N times as fast.
        num_exposed: how many cells have a score of their exposed exchange.
    """

    num_cells: int
    step: tuple[float, float]
    exposed: tuple[float, float]
    num_exposed: int
    signed_error: float
    linear: tuple[float, float] = (math.nan, math.nan)

    @property
    def skill(self) -> float:
        """The skill of the median error of the step."""
        return skill(self.step[0], self.linear[0])

    def linear_in_words(self) -> str:
        """Compare with linear scaling, in sentences of which the first has no capital."""
        mid, worst = (f"{100 * error:.1f} %" for error in self.linear)
        return (
            f"linear scaling has a median error of {mid} and a largest error of {worst}. The skill "
            f"of the predictions over linear scaling is {self.skill:.2f}."
        )

    def in_sentences(self) -> str:
        """Write the errors for a page."""
        mid, worst = (f"{100 * error:.1f} %" for error in self.step)
        text = (
            f"For the {number_of(self.num_cells, 'held-out cell')} with an exchange, the median "
            f"error of the predicted step time is {mid}, and the largest error is {worst}."
        )
        if self.num_exposed:
            mid, worst = (f"{100 * error:.1f} %" for error in self.exposed)
            text += (
                f" The exposed exchange is scored for {self.num_exposed} of these cells. Its "
                f"median error is {mid}, and its largest error is {worst}."
            )
        if not math.isnan(self.signed_error):
            text += (
                f" The mean signed error for overlapped steps is {100 * self.signed_error:+z.1f} %."
            )
        if not math.isnan(self.skill):
            text += f" For the {number_of(self.num_cells, 'cell')}, {self.linear_in_words()}"
        return text

    def __str__(self) -> str:
        text = (
            f"{number_of(self.num_cells, 'cell')} with an exchange, step time {_percent(self.step)}"
        )
        if self.num_exposed:
            exposed = f"exposed exchange {_percent(self.exposed)}"
            text += f"; {exposed} ({number_of(self.num_exposed, 'cell')})"
        if not math.isnan(self.signed_error):
            text += f"; overlapped steps {100 * self.signed_error:+z.1f} % on average"
        if not math.isnan(self.skill):
            text += f"; linear scaling: {_percent(self.linear)}; skill {self.skill:.2f}"
        return text


def scored_cell(group: Group, cell: Observation) -> ScoredCell:
    """Predict an observed cell by the hardware of its group."""
    baseline = group.observed(cell.profile, NONE, cell.world_size, cell.per_rank_batch_size)
    return ScoredCell(
        strategy=cell.name,
        profile=cell.profile.name,
        world_size=cell.world_size,
        batch_size=cell.batch_size,
        measured_s=cell.steps_s,
        predicted_s=cell.predicted_s(group.hardware),
        alone_s=(
            baseline.step_s if baseline else math.nan,
            cell.predicted_s(group.hardware, cell.strategy.without_exchange()),
        ),
        evidence=group.evidence(cell),
        overlaps=cell.strategy.pattern.overlaps,
        conditions=group.conditions,
        linear_s=_linear_s(group, cell),
    )


def _linear_s(group: Group, cell: Observation) -> float:
    if alone := group.observed(cell.profile, NONE, 1, cell.batch_size):
        return alone.step_s / cell.world_size
    alone = cell.strategy.without_exchange()
    alone_s = simulate(cell.profile, group.hardware, alone, 1, cell.batch_size).step_s
    return alone_s / cell.world_size


def held_out(cells: Iterable[ScoredCell]) -> list[ScoredCell]:
    """Return the cells that score the model: not fitted, and with an exchange between ranks."""
    return [
        c for c in cells if c.evidence == "held out" and c.strategy != NONE and c.world_size > 1
    ]


def with_exposed(cells: Iterable[ScoredCell], least_exposed: float) -> list[ScoredCell]:
    """Return the cells whose exposed exchange is scored: it exceeds a share of the measured step.

    Below the noise floor its relative error says nothing.
    """
    return [c for c in cells if c.exposed_s[0] > least_exposed * median(c.measured_s)]


def score(cells: Sequence[ScoredCell], least_exposed: float = 0.0) -> Score:
    """Summarise the errors of some cells; `least_exposed` as in `with_exposed`."""
    exposed = [abs(cell.exposed_error) for cell in with_exposed(cells, least_exposed)]
    signed = [cell.error for cell in cells if cell.overlaps]
    steps = [abs(cell.error) for cell in cells]
    return Score(
        num_cells=len(cells),
        step=_middle_and_worst(steps),
        exposed=_middle_and_worst(exposed),
        num_exposed=len(exposed),
        signed_error=mean(signed) if signed else math.nan,
        linear=_middle_and_worst([abs(cell.linear_error) for cell in cells]),
    )


def _middle_and_worst(errors: Sequence[float]) -> tuple[float, float]:
    return (median(errors), max(errors)) if errors else (math.nan, math.nan)


def _percent(errors: tuple[float, float]) -> str:
    return f"median error {100 * errors[0]:.1f} %, worst {100 * errors[1]:.1f} %"


def measured_steps(folder: Path, cells: Sequence[Cell]) -> list[tuple[float, ...]]:
    """Return the step time of each repeat that was measured of each cell; () of a cell without.

    Raises:
        ValueError: the folder holds no record, or one that breaks the contract.
    """
    from lab.record.schema import read_record  # with scipy, which settings do not need

    records = [read_record(path) for path in sorted(folder.glob("*/record.json"))]
    if not records:
        raise ValueError(f"measured={folder} contains no <cell>/record.json; give a study folder")
    times: dict[str, list[float]] = {}
    for record in records:
        if record.status == "done" and record.measure == "throughput" and record.step_s:
            times.setdefault(_point(record), []).append(record.step_s.median)
    return [tuple(times.get(_point(cell), ())) for cell in cells]


def comparison(seconds: Sequence[float], predicted_s: float) -> dict[str, Any]:
    """Return the columns of a row whose cell was measured."""
    step_s = median(seconds)
    return {"measured_s": step_s, "error": predicted_s / step_s - 1, "evidence": "measured"}


def _point(of: Record | Cell) -> str:
    """Return what a measured cell and a predicted one must have in common."""
    work = sorted((key, value) for key, value in of.settings.items() if root_of(key) in ROOTS)
    return repr((of.strategy, of.world_size, of.batch_size, work))
