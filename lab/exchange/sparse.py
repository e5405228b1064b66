"""Base of sparsifying exchanges: some values of each tensor are sent, the others are kept."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.compressible import num_sent
from lab.exchange.error_feedback import ErrorFeedback


class Sparse(Staged, ErrorFeedback):
    """Sends k = ceil(ratio * n) of the n values of each parameter, and keeps the others.

    Args:
        ratio: above 0, at most 1.
        error_feedback: see ErrorFeedback.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, ratio: float, error_feedback: bool) -> None:
        super().__init__(error_feedback)
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise ValueError(f"exchange.ratio={ratio}: must be above 0 and at most 1")
        self.ratio = ratio

    def take(self, bucket: GradBucket) -> tuple[Tensor, Tensor]:
        """Take the values to send from the compensated gradients; leave zeros in `bucket.flat`.

        Returns:
            int64 [values], each value's index in `bucket.flat`, and float32 [values].
        """
        indices, values = [], []
        for name, start, stop in bucket.spans():
            compensated = self.compensated(name, bucket.flat[start:stop])
            count = num_sent(bucket.shapes[name], self.ratio)
            chosen = self.choose(compensated, count, name, bucket.step)
            values.append(compensated[chosen])
            compensated.index_fill_(0, chosen, 0)
            indices.append(chosen + start)
        bucket.flat.zero_()
        return torch.cat(indices), torch.cat(values)

    @abstractmethod
    def choose(self, values: Tensor, count: int, name: str, step: int) -> Tensor:
        """Return the indices of the `count` values to send: int64 [count], without duplicates."""
