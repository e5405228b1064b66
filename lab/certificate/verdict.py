"""Judge whether the gradients that ranks are left with are one mean of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.certificate.sketch import norm
from lab.certificate.watch import Seen

ROUNDINGS = 64  # of float32 in a sum, generously; errors to find are thousands of times larger
COARSE_ROUNDINGS = 4  # of bfloat16 and float16
CLEAR = 4.0  # times nearer to the mean than to anything else, to be told from it
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
