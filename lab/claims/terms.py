"""Terms of the cost model fitted to a paper's figures, and what they are worth on the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from lab.claims.claims import Claim, Paper
from lab.claims.predicted import Predicted
from lab.simulate.fit import START, least_squares
from lab.simulate.hardware import Hardware
from lab.simulate.presets import with_value

PRIOR = 1e-3  # pulls terms that the figures do not determine towards the preset


@dataclass(frozen=True)
class Fit:
    """A figure, and its quantity as predicted three ways.

    Attributes:
        preset: with the hardware as its file says. fitted: with terms fitted to all figures.
        left_out: with terms fitted to the figures of all other networks.
    """

    claim: Claim
    published: float
    preset: float
    fitted: float
    left_out: float


@dataclass(frozen=True)
class Terms:
    """Fitted terms.

    Attributes:
        values: by name, fitted to all figures.
        figures: emergent claims with a published figure.
    """

    values: Mapping[str, float]
    figures: tuple[Fit, ...]

    def error(self, way: str) -> tuple[float, float]:
        """Return median and worst relative error of `preset`, `fitted` or `left_out`."""
        errors = [abs(getattr(each, way) / each.published - 1) for each in self.figures]
        return median(errors), max(errors)


def fit_terms(paper: Paper, hardware: Hardware) -> Terms | None:
    """Fit the terms that a paper's file names; None if it names none.

    Raises:
        ValueError: a term that cannot be fitted.
    """
    figures = [
        claim
        for claim in paper.claims
        if claim.kind == "emergent" and claim.published is not None and not claim.of_device
    ]
    if not paper.fit or not figures:
        return None
    for name in paper.fit:
        if name not in START or not hasattr(hardware, name):
            allowed = ", ".join(START)
            raise ValueError(f"{paper.title}: fit={name}: allowed are {allowed}")
    best = _fitted(paper, hardware, figures)
    networks = {_network(paper, claim) for claim in figures}
    without = {
        network: _fitted(paper, hardware, [c for c in figures if _network(paper, c) != network])
        for network in networks
        if len(networks) > 1
    }
    rows = [
        Fit(
            claim,
            float(claim.published or math.nan),
            _value(paper, hardware, claim),
            _value(paper, best, claim),
            _value(paper, without.get(_network(paper, claim), hardware), claim),
        )
        for claim in figures
    ]
    return Terms({name: getattr(best, name) for name in paper.fit}, tuple(rows))


def _fitted(paper: Paper, hardware: Hardware, figures: Sequence[Claim]) -> Hardware:
    """Fit by least squares of the logarithm of predicted / published."""
    start = np.log([getattr(hardware, name, None) or START[name] for name in paper.fit])

    def machine(x: np.ndarray) -> Hardware:
        changed = hardware
        for name, value in zip(paper.fit, np.exp(x), strict=True):
            changed = with_value(changed, name, float(value))
        return changed

    def residuals(x: np.ndarray) -> np.ndarray:
        ratios = [_value(paper, machine(x), c) / (c.published or math.nan) for c in figures]
        return np.concatenate([np.log(ratios), PRIOR * (x - start)])

    return machine(least_squares(residuals, start).x)


def _value(paper: Paper, hardware: Hardware, claim: Claim) -> float:
    assert paper.profile is not None
    value = claim.value(Predicted(paper.profile, hardware))
    assert value is not None  # figures of throughput are predicted for any profile
    return value


def _network(paper: Paper, claim: Claim) -> str | None:
    return claim.at.profile or paper.profile
