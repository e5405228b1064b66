"""Predict what papers claim by the cost model: facts, speedups and crossovers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, product

import pandas as pd

from lab.claims.claims import Paper, Reproduction
from lab.claims.metrics import ClaimPoint, Facts, MeasuredFacts, Missing, speedup
from lab.model.profile import Profile
from lab.model.work import Counts
from lab.settings.config import load
from lab.settings.files import read_file
from lab.settings.overrides import own_choices
from lab.simulate.hardware import Hardware, parse, uncertainty_samples, with_rate, with_value
from lab.simulate.network import Network
from lab.simulate.step import simulate
from lab.simulate.strategy import Strategy
from lab.simulate.terms import drawn, learned

LARGEST_BATCH = 2**20
SEARCHED = (1e5, 1e13)  # bytes per second
CLOSE = 1.001  # factor to which the rate is determined
MARGIN = 1.05  # factor; strategies within it count as equally fast
FULLY_CONNECTED = "fc"  # prefix of such layers' names, the only sign of their kind in a profile


@dataclass(frozen=True)
class Perturbation:
    """Factors on what predictions start from: rates of all links, times of compute, and bytes."""

    links: float = 1.0
    compute: float = 1.0
    bytes: float = 1.0

    def of(self, hardware: Hardware) -> Hardware:
        """Return the hardware with faster or slower links."""
        links = {
            way: replace(link, bandwidth_bytes_per_s=self.links * link.bandwidth_bytes_per_s)
            for way in ("intra", "inter")
            if (link := getattr(hardware, way))
        }
        rates = tuple(self.links * rate for rate in hardware.node_rates)
        return replace(hardware, node_rates=rates, **links)


@dataclass(frozen=True)
class Predicted:
    """Facts by the cost model. Methods raise ConfigError if there is no such file.

    Attributes:
        profile: the paper's, a file of conf/profile; a point may name another.
        hardware: the model runs on it.
        bytes_scale: multiplies the parameters of all profiles.
        network: counts of the paper's; None: as far as the profile gives them.
        place: where in their ranges the values lie that profiles assume; None: as they are given.
        number: of the draw that `hardware` is of what its file leaves open; None: it is none.
        change: of all hardware and profiles.
        origin: the source, whose figures the terms of other hardware must not know.
    """

    profile: str
    hardware: Hardware
    bytes_scale: float = 1.0
    network: Counts | None = None
    place: float | None = None
    number: int | None = None
    change: Perturbation | None = None
    origin: str | None = None
    _steps: dict[ClaimPoint, tuple[float, float]] = field(default_factory=dict, init=False)

    def __str__(self) -> str:
        scale = "" if self.bytes_scale == 1 else f" (scaled to {self.bytes_scale:g} of its bytes)"
        return f"profile {self.profile}{scale} on {self.hardware.name}"

    def step_s(self, at: ClaimPoint) -> float:
        return self._step(at)[0]

    def payload_bytes(self, at: ClaimPoint) -> float:
        return self._step(at)[1]

    def all_reduce_s(self, at: ClaimPoint) -> float:
        network = Network(self._hardware(at), at.world_size)
        return network.all_reduce(at.num_bytes or 0).seconds

    def counts(self) -> Counts:
        """Return the counts of the network, or else of the profile before it is scaled.

        In a profile without a layer named fc…, kinds are unknown.
        """
        if self.network:
            return self.network
        layers = profile_of(self.profile).layers
        connected = [x.parameters for x in layers if x.name.startswith(FULLY_CONNECTED)]
        return Counts(sum(x.parameters for x in layers), sum(connected) if connected else None)

    def _step(self, at: ClaimPoint) -> tuple[float, float]:
        if at not in self._steps:  # claims share cells
            self._steps[at] = self._simulated(at)
        return self._steps[at]

    def _simulated(self, at: ClaimPoint) -> tuple[float, float]:
        if at.batch_size % at.world_size:
            raise Missing(f"{at.world_size} ranks cannot share a batch of {at.batch_size}")
        per_rank_batch = at.batch_size // at.world_size
        profile = profile_of(at.profile or self.profile, self.bytes_scale)
        if self.place is not None:
            profile = profile.drawn(self.place)
        if self.change:
            profile = profile.scaled(self.change.bytes, self.change.compute)
        strategy, hardware = strategy_of(at.strategy), self._hardware(at)
        try:
            step = simulate(profile, hardware, strategy, at.world_size, per_rank_batch)
        except ValueError as error:
            raise Missing(str(error)) from None
        return step.step_s, step.payload_bytes

    def _hardware(self, at: ClaimPoint) -> Hardware:
        hardware = self.hardware
        if at.hardware:
            # The terms are of steps: a collective alone meets none of what they stand for.
            alone = at.num_bytes is not None
            hardware = preset_of(at.hardware) if alone else hardware_of(at.hardware, self.origin)
            hardware = hardware if self.number is None else _draw(hardware, self.number)
        if at.rate_gbit is not None:
            hardware = with_rate(hardware, at.rate_gbit * 1e9 / 8)
        hardware = with_texts(hardware, at.values)
        return self.change.of(hardware) if self.change else hardware


# Cached: reading settings takes longer than simulating a step.
@cache
def profile_of(name: str, bytes_scale: float = 1.0) -> Profile:
    """Read a file of conf/profile. ConfigError: there is none."""
    return Profile.parse(read_file("profile", name)).scaled(bytes_scale)


@cache
def preset_of(name: str) -> Hardware:
    """Read a file of conf/hardware. ConfigError: there is none."""
    return parse(read_file("hardware", name))


@cache
def hardware_of(name: str, origin: str | None = None) -> Hardware:
    """Return a preset with the learned terms.

    Args:
        origin: the source whose claims are predicted: no term is fitted to its figures.
    """
    return learned(preset_of(name), left_out=origin)


@cache
def _draw(hardware: Hardware, number: int) -> Hardware:
    """Draw what a file and the learned terms leave open; draws are numbered from 0."""
    return next(islice(drawn(uncertainty_samples(hardware)), number, None))


def with_texts(hardware: Hardware, texts: Sequence[str]) -> Hardware:
    """Return the hardware with the values of a point. ValueError: one is no KEY=VALUE of it."""
    for text in texts:
        key, _, value = text.partition("=")
        try:
            hardware = with_value(hardware, key, float(value))
        except (AttributeError, TypeError, ValueError):
            where = f"at.values={text}"
            raise ValueError(f"{where}: must be KEY=VALUE, with a key of {hardware.name}") from None
    return hardware


@cache
def strategy_of(name: str) -> Strategy:
    """Compose `strategy=name`. ConfigError: there is none; ValueError: it has no cost model."""
    return Strategy.of(load(own_choices([f"strategy={name}"])))


RATES = tuple(10 ** (power / 10) for power in range(70, 116))  # bytes per second
MAP_RANKS = tuple(2**power for power in range(1, 9))
MAP_BATCHES = tuple(2**power for power in range(6, 16))


@dataclass(frozen=True)
class CellSpeedup:
    """Speedup of a cell over one rank; NaN where it is unknown.

    Attributes:
        repeats: measured values of the repeats that are known.
        published: figures of claims about this cell.
    """

    at: ClaimPoint
    predicted: float
    measured: float
    repeats: tuple[float, ...]
    published: tuple[float, ...]


def cell_speedups(
    paper: Paper, grid: Reproduction, predicted: Facts, measured: MeasuredFacts | None
) -> tuple[CellSpeedup, ...]:
    """Compute the speedup of every cell of `grid`."""
    repeats = measured.repeats() if measured else ()
    cells = product(grid.strategies, grid.batch_sizes, grid.world_sizes)
    points = [ClaimPoint(strategy, world_size, batch) for strategy, batch, world_size in cells]
    return tuple(
        CellSpeedup(
            at,
            _speedup(predicted, at),
            _speedup(measured, at) if measured else math.nan,
            tuple(v for each in repeats if math.isfinite(v := _speedup(each, at))),
            _published(paper, at),
        )
        for at in points
    )


def rate_speedups(grid: Reproduction, predicted: Predicted) -> pd.DataFrame:
    """Predict the speedup of the largest world size of `grid` for links of any rate.

    Returns:
        batch (global), strategy, rate (bytes per second) and speedup; NaN if unknown.
    """
    at_rate = {
        rate: replace(predicted, hardware=with_rate(predicted.hardware, rate)) for rate in RATES
    }
    return pd.DataFrame(
        {
            **{"batch": batch, "strategy": name, "rate": rate},
            "speedup": _speedup(facts, ClaimPoint(name, max(grid.world_sizes), batch)),
        }
        for batch, name, (rate, facts) in product(
            grid.batch_sizes, grid.strategies, at_rate.items()
        )
    )


def speedup_map(grid: Reproduction, predicted: Predicted) -> pd.DataFrame:
    """Predict the speedup of each strategy of `grid` for any number of ranks and any batch.

    Every rank has cores of its own.

    Returns:
        strategy, batch (global), ranks and speedup; NaN if unknown.
    """
    facts = replace(predicted, hardware=replace(predicted.hardware, num_cores=None))
    places = product(grid.strategies, MAP_BATCHES, MAP_RANKS)
    rows = [(*place, _speedup(facts, ClaimPoint(place[0], place[2], place[1]))) for place in places]
    return pd.DataFrame(rows, columns=["strategy", "batch", "ranks", "speedup"])


def _published(paper: Paper, at: ClaimPoint) -> tuple[float, ...]:
    claims = (claim for claim in paper.claims if (claim.quantity, claim.at) == ("speedup", at))
    return tuple(claim.published for claim in claims if claim.published is not None)


def _speedup(facts: Facts, at: ClaimPoint) -> float:
    try:
        return speedup(facts, at)
    except Missing:
        return math.nan


def crossovers(
    grid: Reproduction, predicted: Predicted
) -> tuple[dict[str, int | None], dict[int, float | None]]:
    """Search where one way of training overtakes another on the largest world size of `grid`.

    Returns:
        By strategy, see `crossover_batch`; and by global batch, see `crossover_rate`: of the
            grid's pair of strategies, and empty if it names none.
    """
    ranks, pair = max(grid.world_sizes), grid.rate_crossover
    batches = {name: crossover_batch(predicted, name, ranks) for name in grid.strategies}
    sizes = grid.batch_sizes if pair else ()
    return batches, {size: crossover_rate(predicted, pair, ranks, size) for size in sizes if pair}


def crossover_batch(predicted: Predicted, strategy: str, world_size: int) -> int | None:
    """Find the smallest global batch that `world_size` ranks train faster than one rank does.

    Only multiples of `world_size` are tried; None if none up to LARGEST_BATCH is faster. If a
    batch pays, every larger one is assumed to pay.
    """

    def pays(per_rank: int) -> bool:
        return speedup(predicted, ClaimPoint(strategy, world_size, per_rank * world_size)) > 1

    largest = LARGEST_BATCH // world_size
    if not pays(largest):
        return None
    return world_size * (1 + bisect_left(range(1, largest), True, key=pays))


def crossover_rate(
    predicted: Predicted, strategies: tuple[str, str], world_size: int, batch_size: int
) -> float | None:
    """Find the link rate in bytes per second below which the first strategy is MARGIN faster.

    Args:
        strategies: the first is meant for slow links, such as one that compresses.
        batch_size: global.

    Returns:
        None if the first is faster at both ends of SEARCHED, or at neither.
    """

    def pays(rate: float) -> bool:
        facts = replace(predicted, hardware=with_rate(predicted.hardware, rate))
        one, other = (facts.step_s(ClaimPoint(x, world_size, batch_size)) for x in strategies)
        return MARGIN * one < other

    low, high = SEARCHED
    if not pays(low) or pays(high):
        return None
    while high / low > CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high
