"""Judge a paper's claims by the facts: by measurements, or else by predictions."""

from __future__ import annotations

from dataclasses import dataclass

from lab.claims.claims import Claim, Paper
from lab.claims.metrics import Facts, MeasuredFacts


@dataclass(frozen=True)
class Verdict:
    """A claim, and the values of its quantity.

    Attributes:
        predicted, measured: None if unknown.
        repeats: the values of those repeats that have one.
    """

    claim: Claim
    predicted: float | None
    measured: float | None = None
    repeats: tuple[float, ...] = ()

    @property
    def evidence(self) -> str:
        """Return which value decides: "measured" if there is one, else "predicted"."""
        return "predicted" if self.measured is None else "measured"

    @property
    def outcome(self) -> str:
        """Return one of lab.claims.claims.VERDICTS."""
        value = self.predicted if self.measured is None else self.measured
        return self.claim.check.verdict(value)


def judge(paper: Paper, predicted: Facts, measured: MeasuredFacts | None) -> tuple[Verdict, ...]:
    """Compute each claim's values from the facts."""
    repeats = measured.repeats() if measured else ()
    verdicts = []
    for claim in paper.claims:
        values = (claim.value(repeat) for repeat in repeats)
        known = tuple(value for value in values if value is not None)
        value = claim.value(measured) if measured else None
        verdicts.append(Verdict(claim, claim.value(predicted), value, known))
    return tuple(verdicts)
