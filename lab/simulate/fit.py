"""Fit hardware to a study's measurements on one and two ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from lab.model.profile import Profile
from lab.simulate.hardware import Hardware
from lab.simulate.step import Strategy, simulate

LARGEST_FITTED = 2  # ranks; more are held out, to score predictions
PRIOR = 1e-3  # pulls values that the cells do not determine towards the preset
# Start of the search where the preset has 0, because the search multiplies.
START = {"latency_s": 1e-4, "codec_s": 1e-4, "contention": 0.05, "overhead_s": 1e-4}
LINK = ("latency_s", "bandwidth_bytes_per_s")
NAMES = (
    *(*LINK, "reduce_bytes_per_s", "codec_bytes_per_s", "codec_s"),
    *("contention", "overhead_s"),
)
Residuals = Callable[[np.ndarray], np.ndarray]


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
    def step_s(self) -> float:
        """The median over repeats."""
        return median(self.steps_s)


@dataclass(frozen=True)
class Group:
    """The cells of a study that share machine and links, and the hardware fitted to them.

    Attributes:
        conditions: the settings by which the study's groups differ; empty if there is one group.
        hardware: fitted to the cells of one and two ranks.
    """

    conditions: str
    observations: tuple[Observation, ...]
    hardware: Hardware

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
                return {"measured_s": one.step_s, "error": error, "evidence": evidence(world_size)}
        return {}


def evidence(world_size: int) -> str:
    """Return the kind of evidence that a cell of so many ranks gives."""
    return "fitted" if world_size <= LARGEST_FITTED else "held out"


def fit(preset: Hardware, cells: Sequence[Observation]) -> Hardware:
    """Fit the hardware to cells of at most two ranks.

    Least squares of predicted - measured over the logarithms of the values in NAMES that the preset
    has. The fitted link joins the first two ranks.

    Raises:
        ValueError: there is no cell of two ranks.
    """
    used = [cell for cell in cells if cell.world_size <= LARGEST_FITTED]
    if not any(cell.world_size == LARGEST_FITTED for cell in used):
        raise ValueError("no finished throughput run of two ranks that this model could predict")
    measured = np.array([cell.step_s for cell in used])
    typical = np.median(measured)
    names = [name for name in NAMES if get(preset, name) is not None]
    start = np.log([get(preset, name) or START[name] for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        hardware = with_values(preset, names, np.exp(x))
        predicted = [
            simulate(
                cell.profile,
                hardware,
                cell.strategy,
                cell.world_size,
                cell.per_rank_batch_size,
            ).step_s
            for cell in used
        ]
        return np.concatenate([(predicted - measured) / typical, PRIOR * (x - start)])

    return with_values(preset, names, np.exp(least_squares(residuals, start)))


def get(hardware: Hardware, name: str) -> float | None:
    """Return the value of one of NAMES; None if this hardware has no such limit."""
    return getattr(getattr(hardware, _pair(hardware)) if name in LINK else hardware, name)


def with_values(hardware: Hardware, names: Sequence[str], values: np.ndarray) -> Hardware:
    """Return the hardware with new values for `names`."""
    changes = dict(zip(names, map(float, values), strict=True))
    pair = _pair(hardware)
    link = replace(getattr(hardware, pair), **{n: changes.pop(n) for n in LINK if n in changes})
    return replace(hardware, **{pair: link}, **changes)


def _pair(hardware: Hardware) -> str:
    """Name the link between the first two ranks."""
    return "intra" if hardware.ranks_per_node > 1 else "inter"


def least_squares(residuals: Residuals, x: np.ndarray) -> np.ndarray:
    """Find the least sum of squares near `x`; return its x."""
    from scipy import optimize  # takes half a second to import, which only fits need

    return optimize.least_squares(residuals, x, x_scale="jac").x
