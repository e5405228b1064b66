"""Data held in memory, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lab.data.sampler import GlobalSampler


class TensorData:
    """Images and labels that are on the device already.

    Args:
        train: images float32 [num_train, C, H, W] and labels int64 [num_train].
        test: likewise [num_test, ...].
        num_classes: labels are 0 to num_classes - 1.
    """

    def __init__(
        self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], num_classes: int
    ) -> None:
        self._train = train
        self._test = test
        self.num_train, channels, height, width = train[0].shape
        self.image_shape = (channels, height, width)
        self.num_test = len(test[0])
        self.num_classes = num_classes

    def train_batches(self, sampler: GlobalSampler) -> Iterator[tuple[Tensor, Tensor]]:
        """See lab.data.Data. Indices are on the device a step before they are needed."""
        images, labels = self._train
        places = (to_device(indices, images.device) for _, indices in sampler)
        for here, _ in pairwise(places):
            yield images[here], labels[here]

    def test_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See lab.data.Data."""
        images, labels = self._test
        stride = world_size * batch_size
        for start in range(rank, self.num_test, stride):
            part = slice(start, start + stride, world_size)
            yield images[part], labels[part]


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """`values` on `device`: on a CPU the same memory, else a copy that the host does not wait for.

    Only pinned memory can be copied so. It may be dropped at once: torch's allocator does not hand
    it out again before the device has read it.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
