"""Describe a paper's claims about scaling, one by one, and check values against them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.claims.metrics import QUANTITIES, Facts, Missing, Point
from lab.model.facts import Convolution

VERDICTS = ("holds", "fails", "unknown")


@dataclass(frozen=True)
class Check:
    """A condition on a value: within a share of `about`, `at_least` or `at_most`."""

    about: float | None = None
    within: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        bounds = (self.about, self.at_least, self.at_most)
        one_bound = sum(bound is not None for bound in bounds) == 1
        if not one_bound or (self.about is None) != (self.within is None):
            raise ValueError("must give about and within, or at_least, or at_most")

    def verdict(self, value: float | None) -> str:
        """Judge a value: one of VERDICTS."""
        if value is None or math.isnan(value):
            return "unknown"
        return "holds" if self._allows(value) else "fails"

    def _allows(self, value: float) -> bool:
        if self.about is not None and self.within is not None:
            return abs(value - self.about) <= self.within * abs(self.about)
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is not None and value <= self.at_most

    def __str__(self) -> str:
        if self.about is not None and self.within is not None:
            return f"{self.about:.4g} ± {100 * self.within:g} %"
        return f"≥ {self.at_least:.4g}" if self.at_least is not None else f"≤ {self.at_most:.4g}"


@dataclass(frozen=True)
class Claim:
    """One sentence or label of a paper.

    Attributes:
        says: the sentence itself.
        source: its page, slide or label.
        quantity: a key of lab.claims.metrics.QUANTITIES.
        at: the point where the quantity is taken.
        published: the figure in the sentence; None if there is none.
    """

    says: str
    source: str
    quantity: str
    check: Check
    at: Point = field(default_factory=Point)
    published: float | None = None

    def value(self, facts: Facts) -> float | None:
        """Compute the quantity from `facts`; None if these do not give it."""
        try:
            return QUANTITIES[self.quantity](facts, self.at)
        except Missing:
            return None


@dataclass(frozen=True)
class Reproduction:
    """The study that measures what a paper claims, on an emulated cluster.

    Attributes:
        study: a file of conf/study.
        hardware: a file of conf/hardware: the emulated cluster before anything is fitted.
        bytes_scale: scales gradients, which keeps the ratio of compute to communication.
        model: the lab's own, whose parameters are counted.
        strategies, world_sizes, batch_sizes: the figures show these; batches are global.
        rate_crossover: two strategies: below which rate of the links is the first faster?
    """

    study: str
    hardware: str
    bytes_scale: float
    model: str
    strategies: tuple[str, ...]
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    rate_crossover: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.rate_crossover is not None and len(self.rate_crossover) != 2:
            raise ValueError(f"rate_crossover={self.rate_crossover}: must name two strategies")


@dataclass(frozen=True)
class Paper:
    """A file of conf/claims.

    Attributes:
        profile, hardware: the source of predictions.
        reproduction: None if there is no study that measures the claims.
    """

    title: str
    profile: str
    hardware: str
    claims: tuple[Claim, ...]
    reproduction: Reproduction | None = None

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> Paper:
        """Parse the content of a file of conf/claims.

        Raises:
            ValueError: an entry is malformed; the message names its sentence.
        """
        claims = tuple(_claim(entry) for entry in node.get("claims", ()))
        try:
            study = node.get("reproduction")
            frozen = {key: _frozen(value) for key, value in study.items()} if study else None
            reproduction = Reproduction(**frozen) if frozen else None
            return cls(**{**node, "claims": claims, "reproduction": reproduction})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{node.get('title')}: {error}") from None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _claim(entry: Mapping[str, Any]) -> Claim:
    try:
        check, at = Check(**entry["check"]), _point(entry.get("at", {}))
        claim = Claim(**{**entry, "check": check, "at": at})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"claim {entry.get('says')!r}: {error}") from None
    if claim.quantity not in QUANTITIES:
        allowed = ", ".join(QUANTITIES)
        raise ValueError(f"claim {claim.says!r}: quantity={claim.quantity}: allowed are {allowed}")
    if claim.quantity == "operations" and not claim.at.layer:
        raise ValueError(f"claim {claim.says!r}: quantity=operations: at.layer: is missing")
    return claim


def _point(node: Mapping[str, Any]) -> Point:
    layer = node.get("layer")
    return Point(**{**node, "layer": Convolution(**layer) if layer else None})
