"""A certificate in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.certificate.traffic import TOLERANCE
from lab.exchange.compressed import left_exact
from lab.record.certificate import Certificate, Finding, Outcome

if TYPE_CHECKING:
    from lab.certificate.examination import Examination

PROPERTIES = (
    *("equal start", "exchanged", "averaged once", "right group", "complete", "fresh", "bytes"),
)
HOW = {
    "equal start": "random projections of weights and buffers are equal on all ranks",
    "exchanged": "delivered gradients are no rank's own",
    "averaged once": "delivered + errors kept = the mean of the ranks' own gradients",
    "right group": "that mean is over all ranks",
    "complete": "it holds for each parameter that backward reached",
    "fresh": "it is the mean of the same step",
}


class CertificateError(RuntimeError):
    """Gradients are not exchanged as they should be.

    Attributes:
        certificate: what was found.
    """

    def __init__(self, certificate: Certificate) -> None:
        super().__init__(certificate.line)
        self.certificate = certificate


def failed(about: Examination, property: str, text: str) -> Certificate:
    """Return the certificate of a run that has failed in one property."""
    findings = [Finding(property, "fails", text)]
    findings += [
        Finding(other, "not checked", "another property failed first")
        for other in PROPERTIES
        if other != property
    ]
    line = f"certificate: {text}"
    return Certificate(False, line, about.num_exchanges, findings, len(about.names))


def unchecked(reason: str) -> Certificate:
    """Return the certificate of a run in which nothing can be checked."""
    findings = [Finding(each, "not checked", reason) for each in PROPERTIES]
    return Certificate(True, f"certificate: not checked, because {reason}", 0, findings)


def certificate(done: Examination) -> Certificate:
    """Return the certificate of an examination in which nothing failed."""
    verdict, about = done.verdict, done.about
    if verdict is None:
        return unchecked("no exchange of finite gradients was seen")
    unused = _names(done, verdict.unused.tolist())
    alike = _names(done, verdict.alike.tolist())
    proven, bytes_ = int(verdict.proven.sum()), _bytes(done)
    equal = f"{about.size} ranks equal"
    if proven:
        counted = f"{proven} of {len(done.names)} parameters"
        notes = [*_note("unused", unused), *_note(_why_alike(done), alike)]
        counted += f" ({'; '.join(notes)})" if notes else ""
        said = f"{about.promise} over {about.size} of {about.num_launched}, {counted}"
    else:
        said = f"gradients not checked, because {_why_alike(done)} on all parameters"
    line = "; ".join([f"certificate: {equal}, {said}, {bytes_.words}", *_left_exact(done)])
    return Certificate(
        holds=True,
        line=line,
        num_exchanges=done.num_exchanges,
        findings=[*_of_gradients(done, proven), bytes_.finding],
        num_parameters=len(done.names),
        proven=proven,
        unused=unused,
        alike=alike,
        factor=done.ledger.factor,
        counted_factor=bytes_.counted_factor,
    )


def _of_gradients(done: Examination, proven: int) -> list[Finding]:
    findings = [Finding("equal start", "holds", HOW["equal start"])]
    for name in ("exchanged", "averaged once", "right group", "complete", "fresh"):
        outcome: Outcome = "holds" if proven else "not checked"
        detail = HOW[name] if proven else _why_alike(done)
        if name == "fresh" and proven and done.num_exchanges < 2:
            outcome, detail = "not checked", "one exchange was seen, so no buffer was used again"
        findings.append(Finding(name, outcome, detail))
    return findings


def _left_exact(done: Examination) -> list[str]:
    """Say what a codec leaves as it is, beside the bytes that it saves less by."""
    shapes = {name: p.shape for name, p in zip(done.names, done.parameters, strict=True)}
    return left_exact(done.about.exchange, shapes) if done.about.exchange else []


def _why_alike(done: Examination) -> str:
    if math.isinf(done.bound):
        return f"{done.about.name} states no bound of its error"
    if done.bound:
        return f"gradients too alike on all ranks beside the error of {done.about.name}"
    return "gradients alike on all ranks"


def _names(done: Examination, flags: list[bool]) -> list[str]:
    return [name for name, flag in zip(done.names, flags, strict=True) if flag]


def _note(why: str, names: list[str]) -> list[str]:
    if not names:
        return []
    return [
        f"{why}: {names[0]}" if len(names) == 1 else f"{why}: {names[0]} and {len(names) - 1} more"
    ]


@dataclass(frozen=True)
class _Bytes:
    words: str
    finding: Finding
    counted_factor: float | None = None


def _bytes(done: Examination) -> _Bytes:
    """Put the bytes into words, which a formula and, where it can, an interface has checked."""
    factor = done.ledger.factor
    if factor is None:
        why = f"{done.about.name} sends by no Comm"
        return _Bytes(f"bytes not counted, because {why}", Finding("bytes", "not checked", why))
    ratio, where = done.ledger.excess()
    if ratio is not None and ratio < 1 - TOLERANCE:
        ratio, where = None, f"the bytes did not cross {where}"
    if ratio is not None and ratio > 1 + TOLERANCE:
        ratio, where = None, f"others send over {where}"
    if ratio is None:
        words = f"{_times(factor)} (not counted: {where})"
        return _Bytes(words, Finding("bytes", "not checked", where))
    counted = done.ledger.counted_factor
    detail = f"{where} counted {ratio:.3f} times the bytes handed to the network"
    words = f"{_times(factor)} ({where} counted {counted:.1f}x)"
    return _Bytes(words, Finding("bytes", "holds", detail), counted)


def _times(factor: float) -> str:
    if factor > 1 + TOLERANCE:
        return f"{factor:.1f}x less than fp32"
    return (
        "as many bytes as fp32" if factor > 1 - TOLERANCE else f"{1 / factor:.1f}x more than fp32"
    )
