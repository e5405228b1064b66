"""What is trained on: each data set fulfils the protocol Data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from lab.data.sampler import GlobalSampler


class Data(Protocol):
    """Labelled images, on the device that they were made for.

    Attributes:
        image_shape: (C, H, W) of one image.
        num_classes: labels are 0 to num_classes - 1.
        num_train, num_test: number of images of each part, over all ranks.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    num_train: int
    num_test: int

    def train_batches(self, sampler: GlobalSampler) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches: images float32 [per-rank batch, C, H, W], labels int64 [per-rank batch].

        They follow `sampler`, and depend on nothing but its order and the seed of the data.
        """
        ...

    def test_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Test images rank::world_size once, at most `batch_size` at a time; types as above.

        Every image comes once over all ranks; a rank may have none.
        """
        ...
