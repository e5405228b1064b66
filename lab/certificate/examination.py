"""The first exchanges as all ranks saw them, judged; and the certificate of that, in words.

Gradients that ranks are left with must be one mean of their own. Wrong ones are named: a sum, a
rank's own, another group's mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
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
from lab.certificate.watch import HEAD, Seen, norm
from lab.distributed.launcher import Nodes
from lab.exchange.base import Exchange
from lab.exchange.compressed import left_exact
from lab.exchange.layout import travel_shape
from lab.record.schema import Certificate, CertifiedProperty, Outcome

HOW = {
    "equal start": "random projections of weights and buffers are equal on all ranks",
    "exchanged": "no delivered gradient is just one rank's own",
    "averaged once": "delivered + errors kept = the mean of the ranks' own gradients",
    "right group": "the delivered mean is over all ranks",
    "complete": "the mean is delivered for each parameter that backward reached",
    "fresh": "the mean is that of the same step's gradients",
}
PROPERTIES = (*HOW, "bytes")
NUM_EXCHANGES = 3  # buckets are planned anew after the first, and used again in the third
TF32_EPS = 2.0**-10
IMAGE_EPS = 2.0**-42  # images are sums of many values in float64, and round as well
ROUNDINGS = 64  # of float32 in a sum, generously; errors to find are thousands of times larger
COARSE_ROUNDINGS = 4  # of bfloat16 and float16
CLEAR = 4.0  # times nearer to the mean than to anything else, to be told from it
NEAR = 1e-3  # relative distance at which a gradient is taken for a candidate
NEAR_ROUNDINGS = 8  # and so many spacings of the gradients' type
NEAR_LOSSY = 0.25  # the same after an exchange that is off by a bound
TAKES_PART = 0.1  # share of the largest weight from which on a rank takes part in a mean
EQUAL = 1e-12  # relative difference of equal weights, whose images kinds of devices may round


class CertificateError(RuntimeError):
    """Gradients were not averaged correctly over the ranks.

    Attributes:
        certificate: the results of all checks.
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
        nodes: see formula_bytes.
        promise: what ranks are left with, in the certificate's words.
        exchange: the lab's; None: a library's, whose bytes nothing counts as they are sent.
    """

    gather: Callable[[Tensor], Tensor]
    size: int
    num_launched: int
    backend: str
    name: str
    error_bound: Callable[[float, int], float]
    settings: Mapping[str, Any] | None = None
    nodes: Nodes | None = None
    promise: str = "gradients averaged once"
    exchange: Exchange | None = None


@dataclass
class Examination:
    """The exchanges that were looked at so far. All ranks add the same, and find the same.

    Args:
        parameters: the trainable ones, by name. names_at_start: of those and the buffers.
    """

    about: About
    parameters: Mapping[str, nn.Parameter]
    names_at_start: list[str]
    num_exchanges: int = 0
    verdict: StepVerdict | None = None
    bound: float = 0.0
    _last: Tensor | None = None
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.names = list(self.parameters)
        self._sizes = [travel_shape(p).numel() for p in self.parameters.values()]
        self.ledger = Ledger(sum(self._sizes), [])

    def add(self, mine: Seen, sent: Tensor, buckets: Sequence[Bucket]) -> bool:
        """Judge an exchange. A collective call.

        Args: sent: a result of ByteCounter.stop. buckets: empty: unknown.

        Returns: False if it was left out, as a gradient was not finite, or no rank had any.

        Raises: CertificateError: names what is wrong.
        """
        traffic = self.about.gather(sent)  # first: once all have read them, bytes may travel
        seen = mine.of_all(self.about.gather)
        if not seen.is_finite() or not (seen.reached.any() or seen.left.any()):
            return False
        self.num_exchanges += 1
        self._check_start(seen.start)
        if left := seen.left.any(dim=0).nonzero().flatten().tolist():
            name = self.names[left[0]]
            self.fail("complete", f"left out: {name} has a gradient that no exchange has sent")
        self._check_gradients(seen)
        self._check_bytes(traffic, buckets)
        return True

    @property
    def is_done(self) -> bool:
        return self.num_exchanges >= NUM_EXCHANGES

    def check_weights(self, weights: Tensor) -> None:
        """Refuse weights [P, K] that differ after they were exchanged. A collective call."""
        for index, ranks in unequal_at_start(self.about.gather(weights.cpu())).items():
            where = f"{self.names[index]} on {named(ranks)}"
            self.fail("exchanged", f"not exchanged: {where} differs from rank 0's, which was sent")

    def fail(self, property: str, text: str) -> None:
        """End the examination.

        Raises: CertificateError: always.
        """
        others = [each for each in PROPERTIES if each != property]
        findings = [CertifiedProperty(property, "fails", text)]
        findings += [
            CertifiedProperty(e, "not checked", "another property failed first") for e in others
        ]
        line = f"certificate: {text}"
        raise CertificateError(
            Certificate(False, line, self.num_exchanges, findings, len(self.names))
        )

    def certificate(self) -> Certificate:
        """Return what was proven so far, in words; nothing has failed."""
        verdict, about, names = self.verdict, self.about, self.names
        if verdict is None:
            return unchecked("no exchange of finite gradients was seen")
        unused, alike = (
            [names[index] for index in which.nonzero().flatten().tolist()]
            for which in (verdict.unused, verdict.undecided)
        )
        proven, why = int(verdict.proven.sum()), self._why_alike()
        sent, counted_factor, bytes_finding = self._bytes()
        if proven:
            of_why = {"unused": unused, why: alike}
            notes = [f"{each}: {_first_of(those)}" for each, those in of_why.items() if those]
            counted = f"{proven} of {len(names)} parameters"
            counted += f" ({'; '.join(notes)})" if notes else ""
            said = f"{about.promise} over {about.size} of {about.num_launched} ranks, for {counted}"
        else:
            said = f"no gradients checked, because {why}"
        # What a codec leaves as it is, beside the bytes that it saves less by.
        shapes = {name: p.shape for name, p in self.parameters.items()}
        exact = left_exact(about.exchange, shapes) if about.exchange else []
        line = "; ".join([f"certificate: weights equal on {about.size} ranks", said, sent, *exact])
        return Certificate(
            holds=True,
            line=line,
            num_exchanges=self.num_exchanges,
            findings=[*self._findings(proven), bytes_finding],
            num_parameters=len(names),
            proven=proven,
            unused=unused,
            alike=alike,
            factor=self.ledger.factor,
            counted_factor=counted_factor,
        )

    def _findings(self, proven: int) -> Iterator[CertifiedProperty]:
        for name, how in HOW.items():
            outcome: Outcome = "holds" if proven or name == "equal start" else "not checked"
            if name == "fresh" and proven and self.num_exchanges < 2:
                why = "only one exchange was seen, so no buffer was reused"
                yield CertifiedProperty(name, "not checked", why)
            else:
                yield CertifiedProperty(
                    name, outcome, how if outcome == "holds" else self._why_alike()
                )

    def _why_alike(self) -> str:
        if math.isinf(self.bound):
            return f"{self.about.name} states no bound on its error"
        if self.bound:
            name = self.about.name
            return f"gradients are too similar on all ranks, compared with the error of {name}"
        return "gradients are equal on all ranks"

    def _bytes(self) -> tuple[str, float | None, CertifiedProperty]:
        """Put the bytes into words, which a formula and, where it can, an interface has checked.

        Returns: the words, counted_factor of a Certificate, and the finding.
        """
        factor = self.ledger.factor
        if factor is None:
            why = f"{self.about.name} does not send through a Comm"
            return (
                f"bytes not counted, because {why}",
                None,
                CertifiedProperty("bytes", "not checked", why),
            )
        times = f"{1 / factor:.1f}x more bytes than fp32"
        if factor > 1 - TOLERANCE:
            times = "as many bytes as fp32"
        if factor > 1 + TOLERANCE:
            times = f"{factor:.1f}x fewer bytes than fp32"
        ratio, where = self.ledger.excess()
        if ratio is not None and ratio < 1 - TOLERANCE:
            ratio, where = None, f"the bytes did not cross {where}"
        if ratio is not None and ratio > 1 + TOLERANCE:
            ratio, where = None, f"other traffic crossed {where}"
        if ratio is None:
            words = f"{times} (not counted: {where})"
            return words, None, CertifiedProperty("bytes", "not checked", where)
        counted = self.ledger.counted_factor or factor  # it counted, since there is a ratio
        detail = f"{where} counted {ratio:.3f} times the bytes handed to the network"
        words = f"{times} (counted on {where}: {max(counted, 1 / counted):.1f}x)"
        return words, counted, CertifiedProperty("bytes", "holds", detail)

    def _check_start(self, start: Tensor) -> None:
        for index, ranks in unequal_at_start(start).items():
            where = f"{self.names_at_start[index]} on {named(ranks)}"
            text = f"different initial weights: {where} differs from rank 0's in the first step"
            self.fail("equal start", text)

    def _check_gradients(self, seen: Seen) -> None:
        head_only = seen.own.shape[-2] == 1 and self.num_exchanges > 1
        sizes = [min(size, HEAD) if head_only else size for size in self._sizes]
        bound = self.about.error_bound(float(seen.largest.max()), self.about.size)
        self.bound = bound
        roots = torch.tensor(sizes, dtype=torch.float64).sqrt()
        # A norm of so many values, each off by the bound, or by the type's smallest step.
        allowed = bound * roots if bound else torch.zeros_like(roots)
        parameters = self.parameters.values()
        eps = torch.tensor([_eps(p) for p in parameters], dtype=torch.float64)
        types = [torch.finfo(p.dtype) for p in parameters]
        steps = torch.tensor([each.tiny * each.eps for each in types], dtype=torch.float64)
        first = seen.row(0)
        verdict = judge(first, allowed, eps, steps * self.about.size * roots)
        if verdict.wrong.any():
            near = NEAR_LOSSY if bound else max(NEAR, NEAR_ROUNDINGS * float(eps.max()))
            self._fail_gradients(first, verdict, near)
        if self.verdict is None:  # the first one reads all values
            self.verdict = verdict
        elif math.isinf(bound):  # later ones may be anything, so they must be right by themselves
            proven = self.verdict.proven & (verdict.proven | verdict.unused)
            self.verdict = replace(self.verdict, proven=proven)
        self._last = seen.row(-1).sent.mean(dim=0)

    def _fail_gradients(self, seen: Seen, verdict: StepVerdict, near: float) -> None:
        """Name what most of the ranks with wrong gradients hold; `near`: see _of_rank."""
        which, wrong = (verdict.wrong.any(dim=dim).nonzero().flatten().tolist() for dim in (0, 1))
        found = {
            rank: _of_rank(rank, seen, verdict.mean, which, self._last, near) for rank in wrong
        }
        fault, text = Counter(found.values()).most_common(1)[0][0]
        ranks = [rank for rank in wrong if found[rank] == (fault, text)]
        if fault is Fault.OWN and verdict.proven.any():  # other parameters are exchanged
            fault = Fault.LEFT_OUT
        names = [self.names[index] for index in which]
        hold = "holds" if len(ranks) == 1 else "hold"
        failed, words = fault.value
        self.fail(
            failed,
            f"{words}: {named(ranks)} {hold} {text} in {_first_of(names)} (exchange "
            f"{self.num_exchanges}), not the mean of the gradients that the ranks had before it",
        )

    def _check_bytes(self, traffic: Tensor, buckets: Sequence[Bucket]) -> None:
        about = self.about
        self.ledger.entries.append(moved(traffic, about.backend))
        if about.exchange is None:
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


def unchecked(reason: str) -> Certificate:
    """Return the certificate of a run in which nothing can be checked."""
    findings = [CertifiedProperty(each, "not checked", reason) for each in PROPERTIES]
    return Certificate(True, f"certificate: not checked, because {reason}", 0, findings)


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


@dataclass(frozen=True)
class StepVerdict:
    """Judgement of one step's gradients, by parameter (P) and rank (N).

    Attributes:
        mean: the image of the right gradient [P, K].
        wrong: where a rank is left with something else [N, P].
        proven: parameters whose gradients are right, and could not be right by chance [P].
        unused: parameters that backward reached on no rank [P].
    """

    mean: Tensor
    wrong: Tensor
    proven: Tensor
    unused: Tensor

    @property
    def undecided(self) -> Tensor:
        """Parameters whose right gradient cannot be told from a wrong one [P]."""
        return ~(self.proven | self.unused | self.wrong.any(dim=0))


def judge(seen: Seen, bound: Tensor, eps: Tensor, least: Tensor) -> StepVerdict:
    """Compare the gradients of all ranks with the mean of their own.

    Args:
        bound: distance of a delivered value from the mean that the exchange allows itself [P];
            infinite: it states none.
        eps: relative spacing of the gradients' type [P].
        least: the norm by which its smallest values may be off [P].
    """
    mean = seen.sent.mean(dim=0)
    unused = seen.reached.sum(dim=0) == 0
    low = eps > torch.finfo(torch.float32).eps
    # Sums round once for each rank, in directions that partly cancel.
    coarse = max(COARSE_ROUNDINGS, len(seen.own) ** 0.5)
    relative = torch.where(low, coarse * eps, ROUNDINGS * eps)
    tolerance = relative * seen.scale.amax(dim=0) + least
    error = norm(seen.delivered - mean)  # [N, P]
    missing = (seen.filled == 0) & ~unused
    wrong = (error > tolerance + bound) | missing | _untouched(seen, mean, tolerance, bound)
    judged = seen.judged > 0
    wrong &= judged[:, None]
    off = torch.maximum(error[judged].amax(dim=0), tolerance)
    # The mean must differ from each rank's own gradient, and from its multiples.
    apart = torch.minimum(norm(seen.own - mean).amax(dim=0), norm(mean) * (1 - 1 / len(seen.own)))
    proven = ~wrong.any(dim=0) & ~unused & (apart > CLEAR * off)
    return StepVerdict(mean, wrong, proven, unused)


def _untouched(seen: Seen, mean: Tensor, tolerance: Tensor, bound: Tensor) -> Tensor:
    """Find gradients within a wide bound of the mean that are a rank's own to the last bits.

    Where all ranks have the same, it is what was exchanged: a mean may be rounded to one's own.
    """
    as_own = norm(seen.delivered - seen.own) <= tolerance
    parted = norm(seen.delivered - seen.delivered[0]).amax(dim=0) > tolerance
    return as_own & parted & (norm(seen.own - mean) > CLEAR * tolerance) & (bound > 0)


def unequal_at_start(start: Tensor) -> dict[int, list[int]]:
    """Return the tensors that differ between ranks, each with the ranks that differ from rank 0.

    Args: start: images [N, tensors, K].
    """
    apart = norm(start - start[0]) > EQUAL * norm(start[0])
    apart |= start.isnan().any(dim=-1) != start[0].isnan().any(dim=-1)
    return {
        index: apart[:, index].nonzero().flatten().tolist()
        for index in range(start.shape[1])
        if apart[:, index].any()
    }


class Fault(Enum):
    """A wrong gradient: its value is the property that fails, and its name in messages."""

    SUMMED = "averaged once", "summed, not averaged"
    DIVIDED = "averaged once", "divided twice"
    SCALED = "averaged once", "scaled"
    UNKNOWN = "averaged once", "not the mean"
    OWN = "exchanged", "not exchanged"
    LEFT_OUT = "complete", "left out"
    GROUP = "right group", "wrong group"
    STALE = "fresh", "stale buffer"


def _of_rank(
    rank: int, seen: Seen, mean: Tensor, which: list[int], last: Tensor | None, near: float
) -> tuple[Fault, str]:
    """Name what a rank holds instead of the mean.

    Args:
        which: the wrong parameters.
        last: image of the mean of the step before [P, K]; None: there was none.
        near: relative distance at which a gradient is taken for a candidate.
    """
    if (seen.filled[rank, which] == 0).all():
        return Fault.LEFT_OUT, "no gradient"
    got, mean = seen.delivered[rank, which], mean[which]
    if not got.any():
        return Fault.STALE, "zeros, as if nothing had been written,"
    candidates = [*_candidates(rank, seen.own[:, which], seen.sent[:, which], mean)]
    if last is not None:
        candidates.append((Fault.STALE, "the mean from the step before", last[which]))
    fault, text, nearest = min(candidates, key=lambda each: apart(got, each[2]))
    if apart(got, nearest) <= near:
        return fault, text
    off = f"something else, off by {apart(got, mean):.2g} of its norm"
    return _mixture(got, seen.sent[:, which], near) or (Fault.UNKNOWN, off)


def _candidates(
    rank: int, own: Tensor, sent: Tensor, mean: Tensor
) -> Iterator[tuple[Fault, str, Tensor]]:
    """Yield what a rank may hold instead of the mean: images [wrong parameters, K]."""
    size = len(own)
    yield Fault.OWN, "the rank's own gradient", own[rank]
    yield Fault.OWN, "the rank's own gradient, compressed", sent[rank]
    yield Fault.SUMMED, f"{size}x the mean", size * mean
    yield Fault.DIVIDED, f"1/{size} of the mean", mean / size
    for other in range(size):
        if other != rank:
            yield Fault.GROUP, f"the gradient of rank {other} alone", sent[other]


def _mixture(got: Tensor, sent: Tensor, near: float) -> tuple[Fault, str] | None:
    """Fit a gradient by a weighted sum of all ranks' ones, and read the weights.

    Args: got: [wrong parameters, K]. sent: [N, wrong parameters, K].
    """
    size, parts = len(sent), sent.flatten(1).T  # [values, N]
    if len(parts) < 2 * size:  # too few values to determine so many weights
        return None
    weights = torch.linalg.lstsq(parts, got.flatten()[:, None], driver="gelsd").solution[:, 0]
    if apart(got.flatten(), parts @ weights) > near:
        return None
    members = (weights.abs() > TAKES_PART * weights.abs().max()).nonzero().flatten().tolist()
    total = float(weights[members].sum())
    if len(members) == size:
        return Fault.SCALED, f"{total:.3g}x the mean"
    times = "" if abs(total - 1) < 2 * near else f"{total:.3g}x "
    return Fault.GROUP, f"{times}the mean over {len(members)} of {size} ({named(members)})"


def apart(got: Tensor, other: Tensor) -> float:
    size = torch.maximum(got.norm(), other.norm())
    return float((got - other).norm() / size) if size else 0.0


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 1", "ranks 0-3" or "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
