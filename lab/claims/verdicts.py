"""Judge a paper's claims by the facts: by measurements, or else by predictions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.claims.claims import EVIDENCE, OUTCOMES, Claim, Paper
from lab.claims.device import Device
from lab.claims.metrics import Facts, MeasuredFacts
from lab.measure.intervals import UNKNOWN, Interval, of_level


@dataclass(frozen=True)
class Verdict:
    """A claim, and the values of its quantity.

    Attributes:
        predicted: or counted; None if unknown.
        predicted_ends: lowest and highest, over draws of what the hardware leaves open.
        measured: over repeats, with an interval where these suffice; all NaN if unknown.
        num_repeats: how many repeats have a value.
    """

    claim: Claim
    predicted: float | None
    predicted_ends: tuple[float, float] | None = None
    measured: Interval = UNKNOWN
    num_repeats: int = 0

    @property
    def evidence(self) -> str:
        """Return which value decides: "measured" if there is one, else "predicted" or "counted"."""
        if not math.isnan(self.measured.mid):
            return "measured"
        return "counted" if self.claim.is_counted else "predicted"

    @property
    def outcome(self) -> str:
        """Return one of OUTCOMES."""
        if self.evidence == "measured":
            return self.claim.check.outcome(self.measured)
        return self.claim.check.outcome(_exact(self.predicted))


def judge(
    paper: Paper,
    predicted: Facts | None,
    measured: MeasuredFacts | None,
    others: Sequence[Facts] = (),
    device: Device | None = None,
) -> tuple[Verdict, ...]:
    """Compute each claim's values from the facts.

    Args:
        predicted: None: all claims are about one device.
        others: predicted as well, by hardware drawn from what its file leaves open.
        device: for claims about one device; None: nothing about one is known.
    """
    return tuple(
        _of_device(claim, device or Device())
        if claim.of_device
        else Verdict(
            claim,
            claim.value(predicted) if predicted else None,
            _ends(claim, [predicted, *others] if predicted else []),
            *_measured(claim, measured),
        )
        for claim in paper.claims
    )


def _of_device(claim: Claim, device: Device) -> Verdict:
    value = claim.found(device)
    if claim.is_counted:
        return Verdict(claim, value.mid if value else None)
    return Verdict(claim, None, None, value or UNKNOWN, 1 if value else 0)


def _ends(claim: Claim, facts: Iterable[Facts]) -> tuple[float, float] | None:
    values = [value for each in facts if (value := claim.value(each)) is not None]
    return (min(values), max(values)) if values else None


def tally(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Count the outcomes of the claims that say something about the source."""
    counts = Counter(each.outcome for each in verdicts if each.claim.kind in EVIDENCE)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def _measured(claim: Claim, measured: MeasuredFacts | None) -> tuple[Interval, int]:
    """Return the value over repeats; of cells with different repeats, their medians' alone."""
    if not measured:
        return UNKNOWN, 0
    values = [claim.value(repeat) for repeat in measured.repeats()]
    known = [value for value in values if value is not None]
    if known and min(known) > 0:
        return of_level(known), len(known)
    return _exact(claim.value(measured)), len(known)


def _exact(value: float | None) -> Interval:
    return UNKNOWN if value is None else Interval(math.nan, value, math.nan)
