"""Score predictions on the measured cells of a study."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from lab.simulate.fit import Group, evidence
from lab.simulate.step import simulate


@dataclass(frozen=True)
class ScoredCell:
    """A measured cell and its prediction.

    Attributes:
        batch_size: global.
        measured_s: step time of each repeat.
        predicted_s: step time.
        evidence: "fitted" if the model was fitted to this cell, "held out" if not.
    """

    strategy: str
    profile: str
    world_size: int
    batch_size: int
    measured_s: tuple[float, ...]
    predicted_s: float
    evidence: str

    @property
    def error(self) -> float:
        """Relative error of the prediction against the median of the repeats."""
        return self.predicted_s / median(self.measured_s) - 1


def scored_cells(group: Group) -> tuple[ScoredCell, ...]:
    """Predict every observed cell by the fitted hardware."""
    return tuple(
        ScoredCell(
            strategy=cell.name,
            profile=cell.profile.name,
            world_size=cell.world_size,
            batch_size=cell.world_size * cell.per_rank_batch_size,
            measured_s=cell.steps_s,
            predicted_s=simulate(
                cell.profile,
                group.hardware,
                cell.strategy,
                cell.world_size,
                cell.per_rank_batch_size,
            ).step_s,
            evidence=evidence(cell.world_size),
        )
        for cell in group.observations
    )
