"""The first exchanges as all ranks saw them, judged; and the certificate of that, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lab.certificate.traffic import (
    BLOCK_BYTES,
    TOLERANCE,
    Bucket,
    Ledger,
    formula_bytes,
    is_labs,
    moved,
)
from lab.certificate.verdict import (
    Diagnosis,
    Fault,
    Verdict,
    bounds,
    diagnose,
    judge,
    named,
    near_of,
    unequal_at_start,
)
from lab.certificate.watch import HEAD, Seen
from lab.distributed.launcher import Nodes
from lab.exchange.base import Exchange
from lab.exchange.compressed import left_exact
from lab.exchange.layout import travel_shape
from lab.record.schema import Certificate, Finding, Outcome

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
TF32_EPS = 2.0**-10
IMAGE_EPS = 2.0**-42  # images are sums of many values in float64, and round as well
PROPERTY = {
    Fault.SUMMED: "averaged once",
    Fault.DIVIDED: "averaged once",
    Fault.SCALED: "averaged once",
    Fault.UNKNOWN: "averaged once",
    Fault.OWN: "exchanged",
    Fault.LEFT_OUT: "complete",
    Fault.GROUP: "right group",
    Fault.STALE: "fresh",
}


class CertificateError(RuntimeError):
    """Gradients are not exchanged as they should be.

    Attributes:
        certificate: what was found.
    """

    def __init__(self, certificate: Certificate) -> None:
        super().__init__(certificate.line)
        self.certificate = certificate


@dataclass(frozen=True)
class About:
    """Facts of an exchange, known before it begins.

    Attributes:
        gather: returns every rank's tensor, of one shape: [...] -> [N, ...] in host memory.
        size: ranks that should take part. num_launched: ranks that a launcher started.
        backend: library that carries the exchange.
        name: of the exchange, for messages.
        error_bound: see Exchange.error_bound.
        settings: of the exchange, which its formula reads; None: unknown.
        counts_itself: the exchange's bytes are counted as they are sent, not as a library says.
        nodes: see formula_bytes.
        promise: what ranks are left with, in the certificate's words.
        exchange: the lab's; None: a library's.
    """

    gather: Callable[[Tensor], Tensor]
    size: int
    num_launched: int
    backend: str
    name: str
    error_bound: Callable[[float, int], float]
    settings: Mapping[str, Any] | None = None
    counts_itself: bool = True
    nodes: Nodes | None = None
    promise: str = "gradients averaged once"
    exchange: Exchange | None = None


@dataclass
class Examination:
    """The exchanges that were looked at so far. All ranks add the same, and find the same.

    Args:
        names: of the trainable parameters. names_at_start: of those and the buffers.
        parameters: the same parameters.
    """

    about: About
    names: list[str]
    names_at_start: list[str]
    parameters: list[nn.Parameter]
    num_exchanges: int = 0
    verdict: Verdict | None = None
    bound: float = 0.0
    _last: Tensor | None = None
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = [travel_shape(p).numel() for p in self.parameters]
        self.ledger = Ledger(sum(self._sizes), [])

    def add(self, mine: Seen, sent: Tensor, buckets: Sequence[Bucket]) -> bool:
        """Judge an exchange. A collective call.

        Args:
            sent: a result of Odometer.stop. buckets: empty: unknown.

        Returns:
            False if it was left out, as a gradient was not finite, or no rank had any.

        Raises:
            CertificateError: names what is wrong.
        """
        traffic = self.about.gather(sent)  # first: once all have read them, bytes may travel
        seen = mine.of_all(self.about.gather)
        if not seen.is_finite() or not (seen.reached.any() or seen.left.any()):
            return False
        self.num_exchanges += 1
        self._check_start(seen.start)
        if left := seen.left.any(dim=0).nonzero().flatten().tolist():
            who = f"{self.names[left[0]]} has a gradient"
            self.fail("complete", f"left out: {who}, which no exchange has taken")
        self._check_gradients(seen)
        self._check_bytes(traffic, buckets)
        return True

    def check_weights(self, weights: Tensor) -> None:
        """Refuse weights [P, K] that differ after they were exchanged. A collective call."""
        for index, ranks in unequal_at_start(self.about.gather(weights.cpu())).items():
            where = f"{self.names[index]} on {named(ranks)}"
            self.fail("exchanged", f"not exchanged: {where} differs from rank 0's, which was sent")

    def fail(self, property: str, text: str) -> None:
        """End the examination.

        Raises:
            CertificateError: always.
        """
        others = [each for each in PROPERTIES if each != property]
        findings = [Finding(property, "fails", text)]
        findings += [Finding(e, "not checked", "another property failed first") for e in others]
        line = f"certificate: {text}"
        raise CertificateError(
            Certificate(False, line, self.num_exchanges, findings, len(self.names))
        )

    def certificate(self) -> Certificate:
        """Return what was proven so far, in words."""
        return _certificate(self)

    def _check_start(self, start: Tensor) -> None:
        for index, ranks in unequal_at_start(start).items():
            where = f"{self.names_at_start[index]} on {named(ranks)}"
            text = f"different initial weights: {where} differs from rank 0's in the first step"
            self.fail("equal start", text)

    def _check_gradients(self, seen: Seen) -> None:
        head_only = seen.own.shape[-2] == 1 and self.num_exchanges > 1
        sizes = [min(size, HEAD) if head_only else size for size in self._sizes]
        self.bound = self.about.error_bound(float(seen.largest.max()), self.about.size)
        eps = torch.tensor([_eps(p) for p in self.parameters], dtype=torch.float64)
        first, bound = seen.row(0), bounds(self.bound, sizes)
        least = torch.tensor(
            [
                _least(p) * self.about.size * size**0.5
                for p, size in zip(self.parameters, sizes, strict=True)
            ],
            dtype=torch.float64,
        )
        verdict = judge(first, bound, eps, least)
        if verdict.wrong.any():
            found = diagnose(first, verdict, self._last, near_of(self.bound, float(eps.max())))
            text = f"{found.fault.value}: {self._located(found)}"
            self.fail(PROPERTY[found.fault], text)
        if self.verdict is None:  # the first one reads all values
            self.verdict = verdict
        self._last = seen.row(-1).sent.mean(dim=0)

    def _located(self, found: Diagnosis) -> str:
        names = [self.names[index] for index in found.parameters]
        which = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
        hold = "holds" if len(found.ranks) == 1 else "hold"
        return (
            f"{named(found.ranks)} {hold} {found.text} in {which} (exchange "
            f"{self.num_exchanges}), not the mean of the ranks' own gradients, noted before it"
        )

    def _check_bytes(self, traffic: Tensor, buckets: Sequence[Bucket]) -> None:
        about = self.about
        self.ledger.entries.append(moved(traffic, about.backend))
        if not about.counts_itself:
            return
        # Each rank's part of each bucket may end in a block that is not full.
        block = max(BLOCK_BYTES, (about.settings or {}).get("block_size", 0))
        padding = 2 * block * about.size * len(buckets) + 16 * len(self.names)
        formula = formula_bytes(about.settings, buckets, about.size, about.nodes)
        if fault := self.ledger.fault(formula, padding, is_labs(about.settings)):
            self.fail("exchanged" if fault.startswith("hook") else "bytes", fault)


def _eps(parameter: nn.Parameter) -> float:
    """Return the relative spacing of a gradient's values, or of products that made it."""
    coarse = parameter.is_cuda and torch.backends.cuda.matmul.allow_tf32
    eps = torch.finfo(parameter.dtype).eps
    return max(eps, TF32_EPS) if coarse else max(eps, IMAGE_EPS)


def _least(parameter: nn.Parameter) -> float:
    """Return the smallest step of a gradient's values, below which they round to zero."""
    about = torch.finfo(parameter.dtype)
    return about.tiny * about.eps


def unchecked(reason: str) -> Certificate:
    """Return the certificate of a run in which nothing can be checked."""
    findings = [Finding(each, "not checked", reason) for each in PROPERTIES]
    return Certificate(True, f"certificate: not checked, because {reason}", 0, findings)


def _certificate(done: Examination) -> Certificate:
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
