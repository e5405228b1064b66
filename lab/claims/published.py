"""Fit the terms of lab.simulate.terms to all published scaling, a source left out at a time.

A figure is the logarithm of a slowdown: a step on N ranks over that on the fewest published, whose
throughput is the one input. The model is hierarchical. A figure of source s has, by the simulator,

    f(terms · e^(host_s or link_s)) + error,    host_s ~ N(0, τ²), link_s ~ N(0, ω²)

where host_s multiplies what a framework and its host cost, link_s what links do, and the error is
Student's t, so that a figure with a cause of its own does not bend what all others share. The
simulator is linearised at the terms' median, again and again (first-order conditional estimation:
Lindstrom and Bates 1990), errors are weighted as of a t (Lange, Little and Taylor 1989), and τ, ω
and the error's scale maximise the likelihood times their priors. scipy and numpy suffice: the
simulator has no gradients that numpyro could sample by, and the mixed models of statsmodels take
no priors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean, median
from typing import Any

import numpy as np
from scipy.optimize import minimize

from lab.claims.claims import Claim, Paper
from lab.claims.metrics import of_linear_scaling
from lab.claims.predicted import preset_of, profile_of, strategy_of, with_texts
from lab.model.profile import Layer, Profile
from lab.settings.files import read_file
from lab.settings.streams import progress
from lab.simulate.hardware import Hardware, Learned
from lab.simulate.score import skill
from lab.simulate.step import simulate
from lab.simulate.strategy import CEILING, Strategy
from lab.simulate.terms import EFFECTS, FREEDOM, TERMS, reach, with_terms

Array = np.ndarray[Any, np.dtype[np.float64]]
DATA = "scaling"  # a file of conf/published
SPEEDUPS = ("speedup", "weak_speedup", "weak_efficiency")
CHANGE = 0.1  # of a term's logarithm, for slopes
CLOSE, LONGEST = 0.02, 1.0  # of a fit's moves, in logarithms
MOST_ROUNDS, MOST_WEIGHTS = 6, 40  # in which slopes are taken anew, and weights
# Assumed, before any figure: how much sources differ, and what remains; factors of 1.6 and 2 open.
SCALES, OPEN = np.log([0.4, 0.3, 0.02]), np.array([0.5, 0.5, 0.7])
MEANS = np.log([term.median for term in TERMS.values()])
SPREADS = np.array([term.spread for term in TERMS.values()])
VARIES = np.array([[term.varies == effect for effect in EFFECTS] for term in TERMS.values()], float)


@dataclass(frozen=True)
class Placement:
    """Ranks, the batch of each, and how they exchange gradients."""

    ranks: int
    batch: int
    strategy: Strategy = field(repr=False)


@dataclass(frozen=True)
class ScalingFigure:
    """A published step over another.

    Attributes:
        origin: figures of one are left out together. says, source: of the figure.
        start, at: the fewest ranks, and those of the figure.
        slowdown: logarithm of the step at `at` over that at `start`, as published.
        linear: the same if N ranks are N times as fast.
    """

    origin: str
    says: str
    source: str
    profile: Profile
    hardware: Hardware
    start: Placement
    at: Placement
    slowdown: float
    linear: float

    def predicted(self, logarithms: Array) -> float:
        """Predict the slowdown by terms."""
        values = dict(zip(TERMS, np.exp(logarithms).tolist(), strict=True))
        machine = with_terms(replace(self.hardware, contention=0.0), values)
        before_s = self._alone_s or self._step_s(machine, self.start)
        return math.log(self._step_s(machine, self.at) / before_s)

    def speedup(self, slowdown: float) -> float:
        """Return the speedup over `start` that a slowdown amounts to."""
        return self.at.ranks / self.start.ranks * math.exp(self.linear - slowdown)

    def error(self, slowdown: float) -> float:
        """Return the relative error of a speedup."""
        return math.exp(self.slowdown - slowdown) - 1

    @cached_property
    def _alone_s(self) -> float | None:
        """The step of one rank, which no term changes; None if `start` has several."""
        return self._step_s(self.hardware, self.start) if self.start.ranks == 1 else None

    def _step_s(self, hardware: Hardware, where: Placement) -> float:
        at = where.strategy, where.ranks, where.batch
        return simulate(self.profile, hardware, *at).step_s


def figures() -> list[ScalingFigure]:
    """Read all published speedups of GPUs: conf/published, and of conf/claims what it names.

    Raises:
        ConfigError: a file is missing.
    """
    node = read_file("published", DATA)
    papers = [Paper.parse(read_file("claims", name)) for name in node["claims"]]
    found = [
        _of_claim(paper, claim)
        for paper in papers
        for claim in paper.claims
        if claim.is_figure and claim.quantity in SPEEDUPS
    ]
    return found + [figure for series in node["series"] for figure in _of_series(series)]


def unseen() -> list[ScalingFigure]:
    """Read the published speedups that were found once the model was final: no fit has them.

    Raises:
        ConfigError: a file is missing.
    """
    return [
        each for series in read_file("published", DATA)["unseen"] for each in _of_series(series)
    ]


def _of_claim(paper: Paper, claim: Claim) -> ScalingFigure:
    at, strategy = claim.at, strategy_of(claim.at.strategy)
    profile, hardware = at.profile or paper.profile, at.hardware or paper.hardware
    linear = of_linear_scaling(claim.quantity, at)
    assert paper.origin and profile and hardware and linear and claim.published
    machine = with_texts(preset_of(hardware), at.values)
    ranks, weak = at.over_ranks, claim.quantity != "speedup"
    batch = at.batch_size // (at.world_size if weak else ranks)
    growth = math.log(at.world_size / ranks)
    return ScalingFigure(
        *(paper.origin, claim.says, claim.source, profile_of(profile), machine),
        start=Placement(ranks, batch, strategy if ranks > 1 else CEILING),
        at=Placement(at.world_size, at.batch_size // at.world_size, strategy),
        slowdown=math.log(linear / claim.published) - (0.0 if weak else growth),
        linear=0.0 if weak else -growth,
    )


def _of_series(series: Mapping[str, Any]) -> Iterator[ScalingFigure]:
    """Yield the figures of a line of conf/published: all but that of the fewest ranks."""
    batch, strategy = series["per_rank_batch_size"], strategy_of(series["strategy"])
    machine, steps = preset_of(series["hardware"]), _steps_s(series, batch)
    first = min(steps)
    start = Placement(first, batch, strategy if first > 1 else CEILING)
    profile = _network(series["network"]) if "network" in series else profile_of(series["profile"])
    simulated = simulate(profile, machine, start.strategy, first, batch).step_s
    profile = profile.scaled(time_scale=steps[first] / simulated)
    for ranks, seconds in steps.items():
        if ranks > first:
            says = f"{series['says']}: {ranks} GPUs"
            slowdown = math.log(seconds / steps[first])
            where = start, Placement(ranks, batch, strategy)
            about = series["origin"], says, series["source"], profile, machine
            yield ScalingFigure(*about, *where, slowdown, 0.0)


def _steps_s(series: Mapping[str, Any], batch: int) -> dict[int, float]:
    """Return the published seconds of a step, by number of ranks."""
    if "step_ms" in series:
        return {int(ranks): value / 1000 for ranks, value in series["step_ms"].items()}
    if each := series.get("samples_per_s_per_rank"):
        return {int(ranks): batch / rate for ranks, rate in each.items()}
    return {
        int(ranks): int(ranks) * batch / rate for ranks, rate in series["samples_per_s"].items()
    }


def _network(node: Mapping[str, Any]) -> Profile:
    """Return layers of equal size, whose backward takes twice as long as forward.

    An embedding that shares its weight with the output comes first. It takes no time of its own,
    and has its gradient when backward ends.
    """
    each = int(node["parameters"] / node["layers"])
    layers = [Layer(f"layer{i}", each, 1.0, 2.0) for i in range(node["layers"])]
    if "embedding" in node:
        layers.insert(0, Layer("embedding", int(node["embedding"]), 0.0, 0.0))
    return Profile("layers", "of equal size", 1, tuple(layers))


@dataclass(frozen=True)
class TermsFit:
    """A fit of the terms.

    Attributes:
        logarithms, covariance: of the terms, without what sources add to them.
        effects: spreads τ and ω of a source's factors, as EFFECTS. residual: scale of errors.
    """

    logarithms: Array
    covariance: Array
    effects: Array
    residual: float

    @property
    def of_a_new_source(self) -> Array:
        """The covariance of the terms of a source that nothing is known of."""
        varies = VARIES * self.effects
        return self.covariance + varies @ varies.T

    def scales(self, slopes: Array) -> Array:
        """Return the scale of each figure's error, of a new source."""
        open_ = np.einsum("fi,ij,fj->f", slopes, self.of_a_new_source, slopes)
        return np.sqrt(open_ + self.residual**2)

    @property
    def prior(self) -> Learned:
        """The terms as hardware has them."""
        means, rows = self.logarithms.tolist(), self.of_a_new_source.tolist()
        return Learned(tuple(TERMS), tuple(means), tuple(map(tuple, rows)), self.residual)


def linearised(given: Sequence[ScalingFigure], at: Array) -> tuple[Array, Array]:
    """Predict slowdowns, and their slopes by each term's logarithm."""

    def all_at(logarithms: Array) -> Array:
        return np.array([figure.predicted(logarithms) for figure in given])

    middle = all_at(at)
    moves = CHANGE * np.eye(len(at))
    return middle, np.column_stack([(all_at(at + move) - middle) / CHANGE for move in moves])


def fitted(given: Sequence[ScalingFigure], start: Array = MEANS) -> TermsFit:
    """Fit the terms to figures; `start` is where the search begins."""
    origins = sorted({figure.origin for figure in given})
    member = np.array([[figure.origin == name for name in origins] for figure in given], float)
    published = np.array([figure.slowdown for figure in given])
    fit = TermsFit(start, np.diag(SPREADS**2), np.exp(SCALES[:-1]), math.exp(SCALES[-1]))
    for _ in range(MOST_ROUNDS):
        middle, slopes = linearised(given, fit.logarithms)
        found = _of_lines(published - middle + slopes @ fit.logarithms, slopes, member)
        move = np.clip(found.logarithms - fit.logarithms, -LONGEST, LONGEST)
        fit = replace(found, logarithms=fit.logarithms + move)
        if np.abs(move).max() < CLOSE:
            break
    return fit


def _of_lines(aim: Array, slopes: Array, member: Array) -> TermsFit:
    """Fit the terms to slowdowns that are `slopes` times their logarithms.

    Args:
        member: which figure is of which origin.
    """
    shared = [member * (slopes @ VARIES[:, each])[:, None] for each in range(len(EFFECTS))]
    scales, weights, best = SCALES, np.ones(len(aim)), MEANS
    covariance, before = np.diag(SPREADS**2), np.full(len(MEANS), np.inf)
    for _ in range(MOST_WEIGHTS):
        scales = _scales(aim, slopes, shared, weights, scales)
        inverse = np.linalg.inv(_covariance(scales, shared, weights))
        covariance = np.linalg.inv(slopes.T @ inverse @ slopes + np.diag(SPREADS**-2))
        best = covariance @ (slopes.T @ inverse @ aim + MEANS / SPREADS**2)
        if np.abs(best - before).max() < CLOSE / 2:
            break
        before = best
        # What remains once each source has its most likely factors, in scales.
        left = math.exp(scales[-1]) / weights * (inverse @ (aim - slopes @ best))
        weights = (FREEDOM + 1) / (FREEDOM + left**2)
    return TermsFit(best, covariance, np.exp(scales[:-1]), math.exp(scales[-1]))


def _covariance(scales: Array, shared: Sequence[Array], weights: Array) -> Array:
    """Return the covariance of figures at given terms; `scales` are logarithms of τ, ω and σ."""
    *effects, residual = np.exp(2 * scales)
    of_sources = sum(e * each @ each.T for e, each in zip(effects, shared, strict=True))
    return of_sources + np.diag(residual / weights)


def _scales(
    aim: Array, slopes: Array, shared: Sequence[Array], weights: Array, start: Array
) -> Array:
    """Return the logarithms of τ, ω and σ that the figures make likeliest."""
    of_terms = slopes @ np.diag(SPREADS**2) @ slopes.T
    missed = aim - slopes @ MEANS

    def cost(scales: Array) -> float:
        lower = np.linalg.cholesky(_covariance(scales, shared, weights) + of_terms)
        whitened = np.linalg.solve(lower, missed)
        prior = (((scales - SCALES) / OPEN) ** 2).sum()
        return float(0.5 * (whitened @ whitened + prior) + np.log(np.diag(lower)).sum())

    return minimize(cost, start, method="Nelder-Mead").x


@dataclass(frozen=True)
class HeldOut:
    """A figure, and its slowdown as predicted by terms that were fitted to other sources."""

    figure: ScalingFigure
    slowdown: float
    scale: float

    @property
    def error(self) -> float:
        """Relative error of the speedup."""
        return self.figure.error(self.slowdown)

    @property
    def linear_error(self) -> float:
        """Relative error of N ranks being N times as fast."""
        return self.figure.error(self.figure.linear)

    def ends(self, level: float) -> list[float]:
        """Return the interval of the speedup."""
        return reach(self.figure.speedup(self.slowdown), self.scale, level)

    def covered(self, level: float) -> bool:
        """Return whether the published speedup lies in the interval."""
        low, high = self.ends(level)
        return low <= self.figure.speedup(self.figure.slowdown) <= high


def left_out(given: Sequence[ScalingFigure], start: Array = MEANS) -> dict[str, TermsFit]:
    """Fit the terms once for each origin, to the figures of all others."""
    origins = progress([*dict.fromkeys(figure.origin for figure in given)], "source")
    return {
        name: fitted([figure for figure in given if figure.origin != name], start)
        for name in origins
    }


def held_out(given: Sequence[ScalingFigure], fits: Mapping[str, TermsFit]) -> list[HeldOut]:
    """Predict the figures of each origin by its fit of `left_out`."""
    found: dict[int, HeldOut] = {}
    for origin, fit in fits.items():
        left = [place for place, figure in enumerate(given) if figure.origin == origin]
        found |= zip(left, predicted([given[place] for place in left], fit), strict=True)
    return [found[place] for place in range(len(given))]


def predicted(given: Sequence[ScalingFigure], fit: TermsFit) -> list[HeldOut]:
    """Predict figures of new sources by a fit that has none of them."""
    slowdowns, slopes = linearised(given, fit.logarithms)
    rows = zip(given, slowdowns.tolist(), fit.scales(slopes).tolist(), strict=True)
    return [HeldOut(*row) for row in rows]


@dataclass(frozen=True)
class FigureScore:
    """Absolute errors of some figures beside those of linear scaling, as shares.

    Attributes:
        median, mean, worst, bias: of the model; bias is the mean of the signed errors.
        linear_median, linear_mean: of N ranks being N times as fast.
    """

    number: int
    median: float
    mean: float
    worst: float
    bias: float
    linear_median: float
    linear_mean: float

    @classmethod
    def of(cls, rows: Sequence[HeldOut]) -> FigureScore:
        """Score held-out figures."""
        signed = [row.error for row in rows]
        errors, linear = [abs(e) for e in signed], [abs(row.linear_error) for row in rows]
        bounds = median(errors), mean(errors), max(errors), mean(signed)
        return cls(len(rows), *bounds, median(linear), mean(linear))

    @property
    def skill(self) -> float:
        """The skill of the median error."""
        return skill(self.median, self.linear_median)

    @property
    def mean_skill(self) -> float:
        """The skill of the mean error."""
        return skill(self.mean, self.linear_mean)
