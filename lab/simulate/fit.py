"""Fit hardware to a study's cells of one and two ranks, and score predictions on all others.

A score is of whole steps, and of the exchange in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from lab.model.profile import VALUE_BYTES, Profile
from lab.settings.config import choices_of, load
from lab.settings.overrides import own_choices
from lab.settings.reading import read_json
from lab.simulate.costs import exchange_of, stages_of
from lab.simulate.hardware import Hardware
from lab.simulate.network import Network
from lab.simulate.presets import draws as draws_of
from lab.simulate.step import simulate, stages_of_step
from lab.simulate.strategy import CEILING, Strategy

LARGEST_FITTED = 2  # ranks; more are held out, to score predictions
DRAWS = 39  # the lowest and the highest of so many enclose 95 %
OUTLIER = 0.01  # residuals beyond it weigh less: no codec should bend what all cells share
PRIOR = 1e-3  # pulls values that the cells do not determine towards the preset
FARTHEST = 10.0  # of a logarithm from its start: a wild step must not make a rate of zero
# Start of the search where the preset has 0, because the search multiplies.
START = {
    "latency_s": 1e-4,
    "contention": 0.05,
    "overhead_s": 1e-4,
    "overhead_s_per_rank": 1e-3,
    "codec_s": 1e-4,
    "jitter": 0.01,
    "input_samples_per_s": 1e4,
}
LINK = ("latency_s", "bandwidth_bytes_per_s")
NAMES = (*LINK, "reduce_bytes_per_s", "contention", "overhead_s", "crowding", "codec_s")
MEASURED_CODEC = "onebit"  # codec_bytes_per_s is the rate of this codec
CODEC = "codec of "  # and an exchange's class: its rate
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


@dataclass(frozen=True)
class Fitted:
    """Hardware fitted to cells: the best, and draws from the values that fit as well."""

    hardware: Hardware
    draws: tuple[Hardware, ...]


def used_by_fit(cells: Sequence[Observation]) -> list[Observation]:
    """Return the cells of at most two ranks, without FSDP2's if there are others of two.

    FSDP2's schedule is torch's, and its model is the coarsest: it would bend what all cells share.
    """
    few = [cell for cell in cells if cell.world_size <= LARGEST_FITTED]
    own = [cell for cell in few if not cell.strategy.pattern.gathers_units]
    sending = [cell for cell in own if cell.strategy.exchange != CEILING.exchange]
    return own if any(cell.world_size == LARGEST_FITTED for cell in sending) else few


def fit(preset: Hardware, cells: Sequence[Observation]) -> Fitted:
    """Fit the hardware to cells of at most two ranks.

    Least squares of predicted - measured over the logarithms of the values in NAMES that the preset
    has. The fitted link joins the first two ranks.

    Raises:
        ValueError: there is no cell of two ranks.
    """
    used = used_by_fit(cells)
    if not any(cell.world_size == LARGEST_FITTED for cell in used):
        raise ValueError("no finished throughput run of two ranks that this model could predict")
    measured = np.array([cell.step_s for cell in used])
    typical = np.median(measured)
    names = [name for name in NAMES if get(preset, name) is not None]
    names += sorted({CODEC + name for cell in used for name in _codecs(cell, preset)})
    start = np.log([get(preset, name) or START[name] for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        tried = np.exp(np.clip(x, start - FARTHEST, start + FARTHEST))
        hardware = with_values(preset, names, tried)
        predicted = [cell.predicted_s(hardware) for cell in used]
        return np.concatenate([(predicted - measured) / typical, PRIOR * (x - start)])

    found = least_squares(residuals, start)
    assumed = (each for each in preset.assumed if each.key.rpartition(".")[2] not in names)
    known = replace(preset, assumed=tuple(assumed))
    draws = [
        with_values(machine, names, np.exp(x))
        for machine, x in zip(draws_of(known, DRAWS), found.draws(DRAWS), strict=True)
    ]
    return Fitted(with_values(known, names, np.exp(found.x)), tuple(draws))


def _codecs(cell: Observation, hardware: Hardware) -> set[str]:
    """Name the codecs of a cell that delay backward, one of each level of its exchange."""
    if not exchange_of(cell.strategy.exchange).staged:
        return set()
    network = Network(hardware, cell.world_size)
    stages = stages_of_step(cell.profile, cell.strategy, network)
    return {stage.codec for stage in stages if stage.codec}


def get(hardware: Hardware, name: str) -> float | None:
    """Return one of NAMES, or a codec's rate; None: this hardware has no such limit."""
    if name.startswith(CODEC):
        return hardware.codec_rate(name.removeprefix(CODEC))
    return getattr(getattr(hardware, _pair(hardware)) if name in LINK else hardware, name)


def with_values(hardware: Hardware, names: Sequence[str], values: np.ndarray) -> Hardware:
    """Return the hardware with new values for `names`."""
    changes = dict(zip(names, map(float, values), strict=True))
    fitted = {n.removeprefix(CODEC): changes.pop(n) for n in names if n.startswith(CODEC)}
    rates = tuple(sorted({**dict(hardware.codec_rates), **fitted}.items()))
    pair = _pair(hardware)
    link = replace(getattr(hardware, pair), **{n: changes.pop(n) for n in LINK if n in changes})
    return replace(hardware, codec_rates=rates, **{pair: link}, **changes)


def _pair(hardware: Hardware) -> str:
    """Name the link between the first two ranks."""
    return "intra" if hardware.ranks_per_node > 1 else "inter"


@dataclass(frozen=True)
class Solution:
    """The least sum of squares.

    Attributes:
        x: [n]. covariance: [n, n], as far as the residuals determine x.
    """

    x: np.ndarray
    covariance: np.ndarray

    def draws(self, number: int) -> np.ndarray:
        """Draw [number, n] values around x; each differs from x at most by a factor of e."""
        chance = np.random.default_rng(0)
        drawn = chance.multivariate_normal(self.x, self.covariance, number, method="eigh")
        return np.clip(drawn, self.x - 1, self.x + 1)


def least_squares(residuals: Residuals, x: np.ndarray) -> Solution:
    """Find the least sum of squares near `x`."""
    from scipy import optimize  # takes half a second to import, which only fits need

    found = optimize.least_squares(residuals, x, x_scale="jac", loss="soft_l1", f_scale=OUTLIER)
    freedom = max(1, len(found.fun) - 2 * len(x))  # a residual of each value is its prior
    variance = 2 * found.cost / freedom
    return Solution(found.x, variance * np.linalg.pinv(found.jac.T @ found.jac))


def calibrate(path: Path, preset: Hardware) -> Hardware:
    """Replace the preset's figures by those that a result of lab.bench contains.

    Raises:
        ValueError: the file is not a result about links or codecs. Values that were fitted before
            are none: rates of codecs hold for the costs of their time alone.
        OSError: the file cannot be read.
    """
    try:
        result = read_json(path)
        if "hardware" in result:
            raise ValueError(
                f"fit={path}: its hardware was fitted under the costs of its time; give the "
                "study that was measured, runs/STUDY, to fit it anew"
            )
        fit = {"collective": _links, "codec": _codec}[result["bench"]]
        return fit(result, preset)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"fit={path}: must be a study, or a result of lab.bench collective or codec: "
            f"{type(error).__name__}: {error}"
        ) from None


def _links(result: Mapping[str, Any], preset: Hardware) -> Hardware:
    """Fit latency and bandwidth of the links to collectives of all sizes.

    Least squares of the logarithm of predicted / measured, because sizes span orders of magnitude.
    """
    known = [row for row in result["rows"] if row["algorithm"] in choices_of("exchange")]
    names = {row["algorithm"] for row in known}
    exchanges = {name: load(own_choices([f"exchange={name}"])).exchange for name in names}
    measured = np.log([row["time_s"]["median"] for row in known])

    def residuals(x: np.ndarray) -> np.ndarray:
        network = Network(with_values(preset, LINK, np.exp(x)), result["world_size"])
        predicted = [
            sum(
                stage.seconds
                for stage in stages_of(
                    [tuple(row.get("shape", (row["size_bytes"] // VALUE_BYTES,)))],
                    exchanges[row["algorithm"]],
                    network,
                )
            )
            for row in known
        ]
        return np.log(predicted) - measured

    start = np.log([get(preset, name) or 1e-4 for name in LINK])
    return with_values(preset, LINK, np.exp(least_squares(residuals, start).x))


def _codec(result: Mapping[str, Any], preset: Hardware) -> Hardware:
    """Set codec_bytes_per_s: bytes of memory that encoding and decoding move, over their time."""
    rows = [row for row in result["rows"] if row["codec"] == MEASURED_CODEC]
    rate = sum(row["bytes"] for row in rows) / sum(row["time_s"]["median"] for row in rows)
    return replace(preset, codec_bytes_per_s=rate)


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
