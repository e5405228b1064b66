"""The definition of the codec of top-k in plain torch; the C++ kernels take the same values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE_EVERY = 257  # odd, and not a divisor of usual widths


def encode(
    gradient: Tensor, residual: Tensor | None, indices: Tensor, values: Tensor, offset: int
) -> None:
    """See lab.codec.topk.codec.encode."""
    compensated = gradient if residual is None else residual.add_(gradient)
    chosen = largest(compensated, len(indices)).sort().values
    indices.copy_(chosen + offset)
    values.copy_(compensated[chosen])
    if residual is not None:
        residual.index_fill_(0, chosen, 0)


def decode(messages: Tensor, out: Tensor) -> None:
    """See lab.codec.topk.codec.decode."""
    out.zero_()
    # No rank sends an index twice, so additions have a fixed order on a GPU too.
    for indices, values in messages:
        out.index_add_(0, indices, values.view(torch.float32), alpha=1 / len(messages))


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` values of largest magnitude; NaN is the largest of all.

    Args:
        values: float32 [n].
        count: at most n.

    Returns:
        int64 [count], in no particular order.
    """
    if values.device.type == "cpu":
        candidates = _above_sampled_threshold(values, count)
        if len(candidates) >= count:
            return candidates[_topk(values[candidates], count)]
    return _topk(values, count)


def _topk(values: Tensor, count: int) -> Tensor:
    return values.abs().topk(count, sorted=False).indices


def _above_sampled_threshold(values: Tensor, count: int) -> Tensor:
    """Return the indices of somewhat more than `count` largest values; fewer after a bad sample.

    On a CPU topk reads all values several times. Deep Gradient Compression (Lin et al. 2018,
    section 3) therefore selects among the values above a threshold taken from a sample.
    """
    sample = values[::SAMPLE_EVERY].abs()
    place = math.ceil(1.25 * count / SAMPLE_EVERY) + 4
    if place > len(sample):
        return torch.empty(0, dtype=torch.int64)
    threshold = sample.topk(place).values[-1]
    # NaN is neither below nor above, so it is among the candidates.
    small = (values < threshold).logical_and_(values > -threshold)
    return small.logical_not_().nonzero().flatten()
