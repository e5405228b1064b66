"""The certificate of a run, as its record holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["holds", "fails", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One property of the exchange.

    Attributes:
        property: "equal start", "exchanged", "averaged once", "right group", "complete", "fresh" or
            "bytes"; docs/certificate.md describes each.
        detail: how it is known, or why it was not checked.
    """

    property: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Certificate:
    """Result of an examination of a run's first exchanges.

    Attributes:
        holds: nothing that was checked failed.
        line: all of it in one line.
        num_exchanges: exchanges that were looked at.
        num_parameters: trainable ones.
        proven: number of those whose gradients are the mean, and could not be by chance.
        unused: names of those that backward reached on no rank.
        alike: names of those whose right gradient cannot be told from a wrong one.
        factor: bytes of an fp32 ring over those handed to the network; null: nothing was.
        counted_factor: the same over the bytes that an interface counted; null: it was not checked.
    """

    holds: bool
    line: str
    num_exchanges: int
    findings: list[Finding]
    num_parameters: int = 0
    proven: int = 0
    unused: list[str] | None = None
    alike: list[str] | None = None
    factor: float | None = None
    counted_factor: float | None = None
