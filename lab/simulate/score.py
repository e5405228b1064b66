"""Score predictions by a study's measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lab.analysis.records import Cell, load_study
from lab.model.profile import VALUE_BYTES, Profile, replayed
from lab.simulate.fit import LARGEST_FITTED, Observation, fit
from lab.simulate.hardware import Hardware
from lab.simulate.step import Strategy

MOST_APART = 0.01  # relative difference in parameters; beyond it model or bytes_scale differ


class Score:
    """A study's cells, and the hardware fitted to those of one and two ranks.

    Args:
        profile: of cells with a real model; cells of model=replay name their own profile.

    Raises:
        ValueError: the study cannot be read, is of another model, or has no cell of two ranks.
    """

    def __init__(self, folder: Path, profile: Profile, preset: Hardware) -> None:
        cells = [cell for cell in load_study(folder).cells if _counts(cell)]
        try:
            self.observations = _observations(cells, profile)
            self.hardware = fit(_on_its_cores(preset, cells), self.observations)
        except ValueError as error:
            raise ValueError(f"fit={folder}: {error}") from None

    def of(
        self,
        profile: Profile,
        strategy: Strategy,
        world_size: int,
        batch_size: int,
        step_s: float,
    ) -> dict[str, Any]:
        """Score one prediction: measured step, error, and kind of evidence.

        Args:
            batch_size: global.
            step_s: predicted.
        """
        point = profile, strategy, world_size, batch_size // world_size
        for one in self.observations:
            if (one.profile, one.strategy, one.world_size, one.per_rank_batch_size) == point:
                error = step_s / one.step_s - 1
                evidence = self.evidence(world_size)
                return {"measured_s": one.step_s, "error": error, "evidence": evidence}
        return {}

    def evidence(self, world_size: int) -> str:
        """Return the kind of evidence that a cell of so many ranks gives."""
        return "fitted" if world_size <= LARGEST_FITTED else "held out"


def _on_its_cores(preset: Hardware, cells: list[Cell]) -> Hardware:
    """Give emulated hardware the cores of the machine on which these cells ran."""
    known = [c.environment["num_cores"] for c in cells if "num_cores" in c.environment]
    if preset.num_cores is None or not known:
        return preset
    return replace(preset, num_cores=min(known))


def _counts(cell: Cell) -> bool:
    timed = cell.status == "done" and cell.measure == "throughput"
    return timed and not math.isnan(cell.step_s)


def _observations(cells: list[Cell], profile: Profile) -> list[Observation]:
    """Collect the cells whose strategy has a cost model; others cannot be scored."""
    alike: dict[str, list[Observation]] = {}
    for cell in cells:
        observation = _observation(cell, profile)
        if observation:
            alike.setdefault(repr(replace(observation, steps_s=())), []).append(observation)
    return [
        replace(same[0], steps_s=tuple(time for each in same for time in each.steps_s))
        for same in alike.values()
    ]


def _observation(cell: Cell, profile: Profile) -> Observation | None:
    composed = OmegaConf.to_container(OmegaConf.load(cell.folder / "config.yaml"), resolve=True)
    assert isinstance(composed, dict)
    settings = {str(key): value for key, value in composed.items()}
    try:
        strategy = Strategy.of(settings)
    except ValueError:
        return None
    replay = replayed(settings)
    if not replay:
        _check_model(cell, profile)
    return Observation(
        cell.strategy,
        replay or profile,
        strategy,
        cell.world_size,
        cell.per_rank_batch_size,
        (cell.step_s,),
    )


def _check_model(cell: Cell, profile: Profile) -> None:
    num_parameters = profile.gradient_bytes / VALUE_BYTES
    if abs(cell.num_parameters / num_parameters - 1) > MOST_APART:
        raise ValueError(
            f"{cell.name} has {cell.num_parameters:.0f} parameters, profile="
            f"{profile.name} {num_parameters:.0f}; give its profile, or profile.bytes_scale="
            f"{profile.bytes_scale * cell.num_parameters / num_parameters:.4g}"
        )
