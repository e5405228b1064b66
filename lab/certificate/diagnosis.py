"""Name what wrong gradients are instead of the mean: a sum, a rank's own, another group's mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from lab.certificate.verdict import Verdict
from lab.certificate.watch import Seen

NEAR = 1e-3  # relative distance at which a gradient is taken for a candidate
NEAR_ROUNDINGS = 8  # and so many spacings of the gradients' type
NEAR_LOSSY = 0.25  # the same after an exchange that is off by a bound
TAKES_PART = 0.1  # share of the largest weight from which on a rank takes part in a mean


class Fault(Enum):
    """A wrong gradient, by the name that messages have for it."""

    SUMMED = "summed, not averaged"
    DIVIDED = "divided twice"
    SCALED = "scaled"
    OWN = "not exchanged"
    LEFT_OUT = "left out"
    GROUP = "wrong group"
    STALE = "stale buffer"
    UNKNOWN = "not the mean"


@dataclass(frozen=True)
class Diagnosis:
    """Finding of what the wrong gradients are.

    Attributes:
        text: says it of one rank: "the rank's own gradient".
        ranks: those of whom it is true.
        parameters: numbers of the parameters that are wrong.
    """

    fault: Fault
    text: str
    ranks: tuple[int, ...]
    parameters: tuple[int, ...]


def diagnose(seen: Seen, verdict: Verdict, last: Tensor | None, near: float) -> Diagnosis:
    """Name what most of the ranks with wrong gradients hold.

    Args:
        last: image of the mean of the step before [P, K]; None: there was none.
        near: relative distance at which a gradient is taken for a candidate.
    """
    wrong = verdict.wrong.any(dim=0)
    which, ranks = wrong.nonzero().flatten(), verdict.wrong.any(dim=1).nonzero().flatten().tolist()
    found = {rank: _of_rank(rank, seen, verdict.mean, which, last, near) for rank in ranks}
    fault, text = Counter(found.values()).most_common(1)[0][0]
    like = tuple(rank for rank in ranks if found[rank] == (fault, text))
    if fault is Fault.OWN and verdict.proven.any():  # other parameters are exchanged
        fault = Fault.LEFT_OUT
    return Diagnosis(fault, text, like, tuple(which.tolist()))


def _of_rank(
    rank: int, seen: Seen, mean: Tensor, which: Tensor, last: Tensor | None, near: float
) -> tuple[Fault, str]:
    if (seen.filled[rank, which] == 0).all():
        return Fault.LEFT_OUT, "no gradient"
    got, mean = seen.delivered[rank, which], mean[which]
    if not got.any():
        return Fault.STALE, "zeros, as if nothing was written,"
    candidates = [*_candidates(rank, seen.own[:, which], seen.sent[:, which], mean)]
    if last is not None:
        candidates.append((Fault.STALE, "the mean of the step before", last[which]))
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

    Args:
        got: [wrong parameters, K]. sent: [N, wrong parameters, K].
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
    """Return the distance of two gradients, relative to the larger one."""
    size = torch.maximum(got.norm(), other.norm())
    return float((got - other).norm() / size) if size else 0.0


def near_of(bound: float, eps: float) -> float:
    """Return the distance at which gradients are alike.

    Args:
        bound: error that the exchange allows itself. eps: relative spacing of the gradients' type.
    """
    return NEAR_LOSSY if bound else max(NEAR, NEAR_ROUNDINGS * eps)


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 1", "ranks 0-3" or "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
