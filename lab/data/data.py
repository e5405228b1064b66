"""What the trainer wants of data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from lab.data.sampler import GlobalSampler

Batch = tuple[Tensor, Tensor]  # float32 images [b, channels, height, width], int64 labels [b]


class Data(Protocol):
    """Images with labels; `image_shape` is (channels, height, width)."""

    image_shape: tuple[int, int, int]
    num_classes: int
    num_train: int

    def train_batches(self, sampler: GlobalSampler) -> Iterator[Batch]:
        """Endless batches on this rank's device, of the samples that `sampler` deals it."""
        ...

    def test_batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Every world_size-th test sample from `rank` on: over all ranks, each sample once."""
        ...
