"""What a compressing exchange sends as it is: small tensors, all in one message."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.exchange.bucket import Bucket


def average_exactly(bucket: Bucket, parts: list[slice], comm: Comm) -> Tensor:
    """Replace `parts` of `bucket.flat` by their mean over the ranks, in one all-reduce.

    Returns:
        float32 [values of all parts]: the means, one part after the other.
    """
    pieces = [bucket.flat[part] for part in parts]
    means = torch.cat([bucket.flat[:0], *pieces])
    if len(means):
        comm.all_reduce(means)
        means.div_(comm.size)
        torch._foreach_copy_(pieces, list(means.split([len(piece) for piece in pieces])))
    return means


def gaps(covered: Iterable[slice], num_values: int) -> list[slice]:
    """What lies between the slices `covered` of `num_values` values, which are in order."""
    found, start = [], 0
    for part in covered:
        if start < part.start:
            found.append(slice(start, part.start))
        start = part.stop
    return [*found, slice(start, num_values)] if start < num_values else found
