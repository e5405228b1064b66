"""Norms of a step's gradients, before and after they are averaged."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.exchange.bucket import GradBucket


class GradientNoise:
    """Collects squared norms: of this rank's gradient, and of the mean over ranks.

    Attributes:
        local, mean: one 0-dim tensor for each step, on the gradients' device.
    """

    def __init__(self) -> None:
        self.local: list[Tensor] = []
        self.mean: list[Tensor] = []
        self._begin()

    def before(self, bucket: GradBucket, size: int) -> None:
        """Add a bucket that is about to be averaged over `size` ranks."""
        factor = size if bucket.divided else 1
        self._local.append(factor**2 * _squared(bucket.flat))

    def after(self, bucket: GradBucket) -> None:
        """Add a bucket that holds the mean."""
        self._mean.append(_squared(bucket.flat))

    def end_step(self) -> None:
        """Sum the buckets of a step."""
        self.local.append(torch.stack(self._local).sum())
        self.mean.append(torch.stack(self._mean).sum())
        self._begin()

    def _begin(self) -> None:
        self._local: list[Tensor] = []
        self._mean: list[Tensor] = []


def _squared(flat: Tensor) -> Tensor:
    return flat.double().square().sum()
