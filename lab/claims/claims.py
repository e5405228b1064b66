"""What a paper says of scaling, sentence by sentence, and whether figures found elsewhere agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.claims.metrics import QUANTITIES, Facts, Missing, Point

VERDICTS = ("holds", "fails", "unknown")


@dataclass(frozen=True)
class Check:
    """What a value must satisfy: within a share of `about`, `at_least` or `at_most`."""

    about: float | None = None
    within: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        given = [self.about is not None, self.at_least is not None, self.at_most is not None]
        if sum(given) != 1 or (self.about is None) != (self.within is None):
            raise ValueError("must give about and within, or at_least, or at_most")

    def verdict(self, value: float | None) -> str:
        """One of VERDICTS."""
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
    """One sentence or label.

    Attributes:
        says: the sentence; source: where it stands.
        quantity: of lab.claims.metrics.QUANTITIES.
        at: the point of the study that it speaks of.
        published: the figure as it stands there; None where the sentence has none.
    """

    says: str
    source: str
    quantity: str
    check: Check
    at: Point = field(default_factory=Point)
    published: float | None = None

    def value(self, facts: Facts) -> float | None:
        """The quantity according to `facts`; None where these do not tell."""
        try:
            return QUANTITIES[self.quantity](facts, self.at)
        except Missing:
            return None


@dataclass(frozen=True)
class Reproduction:
    """The study that measures what a paper claims, on an emulated cluster.

    Attributes:
        study: of conf/study.
        hardware: of conf/hardware: what stands for the cluster before anything is fitted.
        bytes_scale: of gradients, which keeps the ratio of compute to communication.
        model: the lab's own, whose parameters are counted.
        strategies, world_sizes, batch_sizes: of the figures; batches are global.
    """

    study: str
    hardware: str
    bytes_scale: float
    model: str
    strategies: tuple[str, ...]
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Paper:
    """A file of conf/claims.

    Attributes:
        profile, hardware: what predictions are made from.
        reproduction: None where nothing measures it.
    """

    title: str
    profile: str
    hardware: str
    claims: tuple[Claim, ...]
    reproduction: Reproduction | None = None

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> Paper:
        """The content of a file of conf/claims.

        Raises:
            ValueError: an entry that is not of that form; it is named by what it says.
        """
        claims = tuple(_claim(entry) for entry in node.get("claims", ()))
        try:
            given = node.get("reproduction")
            made = Reproduction(**{k: _frozen(v) for k, v in given.items()}) if given else None
            return cls(**{**node, "claims": claims, "reproduction": made})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{node.get('title')}: {error}") from None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _claim(entry: Mapping[str, Any]) -> Claim:
    try:
        check, at = Check(**entry["check"]), Point(**entry.get("at", {}))
        claim = Claim(**{**entry, "check": check, "at": at})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"claim {entry.get('says')!r}: {error}") from None
    if claim.quantity not in QUANTITIES:
        allowed = ", ".join(QUANTITIES)
        raise ValueError(f"claim {claim.says!r}: quantity={claim.quantity}: allowed are {allowed}")
    return claim
