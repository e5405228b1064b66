"""Judge whether the gradients that ranks are left with are one mean of their own.

Wrong ones are named: a sum, a rank's own, another group's mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from lab.certificate.watch import Seen, norm

ROUNDINGS = 64  # of float32 in a sum, generously; errors to find are thousands of times larger
COARSE_ROUNDINGS = 4  # of bfloat16 and float16
CLEAR = 4.0  # times nearer to the mean than to anything else, to be told from it
NEAR = 1e-3  # relative distance at which a gradient is taken for a candidate
NEAR_ROUNDINGS = 8  # and so many spacings of the gradients' type
NEAR_LOSSY = 0.25  # the same after an exchange that is off by a bound
TAKES_PART = 0.1  # share of the largest weight from which on a rank takes part in a mean
EQUAL = 1e-12  # relative difference of equal weights, whose images kinds of devices may round


@dataclass(frozen=True)
class Verdict:
    """Judgement of one step's gradients, by parameter (P) and rank (N).

    Attributes:
        mean: the image of the right gradient [P, K].
        wrong: where a rank is left with something else [N, P].
        proven: parameters whose gradients are right, and could not be right by chance [P].
        unused: parameters that backward reached on no rank [P].
        allowed: the norm by which a gradient may be off [P].
    """

    mean: Tensor
    wrong: Tensor
    proven: Tensor
    unused: Tensor
    allowed: Tensor

    @property
    def alike(self) -> Tensor:
        """Parameters whose right gradient cannot be told from a wrong one [P]."""
        return ~(self.proven | self.unused | self.wrong.any(dim=0))


def judge(seen: Seen, bound: Tensor, eps: Tensor, least: Tensor) -> Verdict:
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
    allowed = tolerance + bound
    error = norm(seen.delivered - mean)  # [N, P]
    missing = (seen.filled == 0) & ~unused
    wrong = (error > allowed) | missing | _untouched(seen, mean, tolerance, bound)
    judged = seen.judged > 0
    wrong &= judged[:, None]
    off = torch.maximum(error[judged].amax(dim=0), tolerance)
    # The mean must differ from each rank's own gradient, and from its multiples.
    apart = torch.minimum(norm(seen.own - mean).amax(dim=0), norm(mean) * (1 - 1 / len(seen.own)))
    proven = ~wrong.any(dim=0) & ~unused & (apart > CLEAR * off)
    return Verdict(mean, wrong, proven, unused, allowed)


def _untouched(seen: Seen, mean: Tensor, tolerance: Tensor, bound: Tensor) -> Tensor:
    """Find gradients within a wide bound of the mean that are a rank's own to the last bits.

    Where all ranks have the same, it is what was exchanged: a mean may be rounded to one's own.
    """
    as_own = norm(seen.delivered - seen.own) <= tolerance
    parted = norm(seen.delivered - seen.delivered[0]).amax(dim=0) > tolerance
    return as_own & parted & (norm(seen.own - mean) > CLEAR * tolerance) & (bound > 0)


def unequal_at_start(start: Tensor) -> dict[int, list[int]]:
    """Return the tensors that differ between ranks, each with the ranks that differ from rank 0.

    Args:
        start: images [N, tensors, K].
    """
    apart = norm(start - start[0]) > EQUAL * norm(start[0])
    apart |= start.isnan().any(dim=-1) != start[0].isnan().any(dim=-1)
    return {
        index: apart[:, index].nonzero().flatten().tolist()
        for index in range(start.shape[1])
        if apart[:, index].any()
    }


def bounds(per_value: float, sizes: Sequence[int]) -> Tensor:
    """Return the largest norm of an error of at most `per_value` in each of a tensor's values."""
    return torch.tensor([per_value * math.sqrt(size) if per_value else 0.0 for size in sizes])


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
