"""Predictions beside what a study measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf

from lab.analysis.records import Cell, load_study
from lab.measure.profile import VALUE_BYTES, Profile
from lab.simulate.fit import LARGEST_FITTED, Observation, fit
from lab.simulate.hardware import Hardware
from lab.simulate.step import Strategy

MOST_APART = 0.01  # of the number of parameters: another model, or another bytes_scale


class Score:
    """A study's cells, and hardware that is fitted to those of one and two ranks.

    Raises:
        ValueError: the study cannot be read, is of another model, or has no cell of two ranks.
    """

    def __init__(self, folder: Path, profile: Profile, preset: Hardware) -> None:
        cells = [cell for cell in load_study(folder).cells if _counts(cell)]
        for cell in cells:
            _check_model(cell, folder, profile)
        self.observations = list(_observations(cells))
        try:
            self.hardware = fit(profile, preset, self.observations)
        except ValueError as error:
            raise ValueError(f"fit={folder}: {error}") from None

    def of(
        self, strategy: Strategy, world_size: int, batch: int, weak: bool, step_s: float
    ) -> dict[str, Any]:
        """What is known of one prediction: its measured step, the error, and what that proves."""
        own = batch if weak else batch // world_size
        known = [
            one.step_s
            for one in self.observations
            if (one.strategy, one.world_size, one.batch) == (strategy, world_size, own)
        ]
        if not known:
            return {}
        measured_s = median(known)
        evidence = "fitted" if world_size <= LARGEST_FITTED else "held out"
        return {
            "measured_s": measured_s,
            "error": step_s / measured_s - 1,
            "evidence": evidence,
        }


def _counts(cell: Cell) -> bool:
    timed = cell.status == "done" and cell.measure == "throughput"
    return timed and not math.isnan(cell.step_s)


def _check_model(cell: Cell, folder: Path, profile: Profile) -> None:
    own = profile.gradient_bytes / VALUE_BYTES
    if not cell.transform and abs(cell.num_parameters / own - 1) > MOST_APART:
        raise ValueError(
            f"fit={folder}: {cell.name} has {cell.num_parameters:.0f} parameters, profile="
            f"{profile.name} {own:.0f}; give its profile, or profile.bytes_scale="
            f"{profile.bytes_scale * cell.num_parameters / own:.4g}"
        )


def _observations(cells: list[Cell]) -> Iterator[Observation]:
    """Those cells whose strategy has a cost model; the others only cannot be scored."""
    for cell in cells:
        settings = OmegaConf.to_container(OmegaConf.load(cell.folder / "config.yaml"), resolve=True)
        assert isinstance(settings, dict)
        try:
            strategy = Strategy.of({str(key): value for key, value in settings.items()})
        except ValueError:
            continue
        own = cell.batch // (1 if cell.scaling == "weak" else cell.world_size)
        yield Observation(strategy, cell.world_size, own, cell.step_s)
