"""Data held in memory, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lab.data import GlobalSampler, rank_batches


class TensorData:
    """Inputs and targets that are already on the device.

    Args:
        train: inputs [num_train, ...] and targets [num_train, ...].
        test: the same with [num_test, ...].
        unit, num_classes, vocabulary: see lab.data.Data.
    """

    def __init__(
        self,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        *,
        unit: str,
        num_classes: int | None,
        vocabulary: int | None = None,
    ) -> None:
        self._train = train
        self._test = test
        self.unit = unit
        self.num_train, *input_shape = train[0].shape
        self.input_shape = tuple(input_shape)
        self.input_dtype = train[0].dtype
        self.num_test = len(test[0])
        self.num_classes = num_classes
        self.vocabulary = vocabulary

    def targets(self) -> tuple[Tensor, Tensor]:
        """See lab.data.Data. Return all targets."""
        return self._train[1], self._test[1]

    def train_batches(self, sampler: GlobalSampler) -> Iterator[tuple[Tensor, Tensor]]:
        """See lab.data.Data. Indices are on the device a step before they are needed."""
        inputs, targets = self._train
        places = (to_device(indices, inputs.device) for _, indices in sampler)
        for here, _ in pairwise(places):
            yield inputs[here], targets[here]

    def test_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See lab.data.Data."""
        inputs, targets = self._test
        for own in rank_batches(self.num_test, rank, world_size, batch_size):
            part = slice(own.start, own.stop, own.step)
            yield inputs[part], targets[part]


def image_data(
    images: Tensor, targets: Tensor, num_test: int, device: torch.device, num_classes: int | None
) -> TensorData:
    """Place images and their targets on the device, the last `num_test` of them to test on."""
    images, targets = images.to(device), targets.to(device)
    train, test = slice(None, -num_test), slice(-num_test, None)
    parts = (images[train], targets[train]), (images[test], targets[test])
    return TensorData(*parts, unit="image", num_classes=num_classes)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return `values` on `device`: on a CPU the same memory, else an asynchronous copy.

    Only pinned memory can be copied asynchronously. It may be freed at once: torch's allocator does
    not reuse it before the device has read it.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
