"""Data that fits on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.data.data import Batch
from lab.data.sampler import GlobalSampler


class TensorData:
    """Images and labels held on the device.

    Args:
        train: images float32 [n, channels, height, width] and labels int64 [n].
        test: likewise.
        num_classes: labels are below it.
    """

    def __init__(self, train: Batch, test: Batch, num_classes: int, device: torch.device) -> None:
        self._train = train[0].to(device), train[1].to(device)
        self._test = test[0].to(device), test[1].to(device)
        channels, height, width = train[0].shape[1:]
        self.image_shape = (channels, height, width)
        self.num_classes = num_classes
        self.num_train = len(train[0])

    def train_batches(self, sampler: GlobalSampler) -> Iterator[Batch]:
        images, labels = self._train
        for samples in sampler:
            index = torch.tensor([index for _, index in samples]).to(images.device)
            yield images[index], labels[index]

    def test_batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        images, labels = (tensor[rank::world_size] for tensor in self._test)
        yield from zip(images.split(batch_size), labels.split(batch_size), strict=True)


def check_positive(**settings: object) -> None:
    """Refuse settings of the data that are no integers above 0.

    Raises:
        ValueError: names the setting.
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"data.{name}={value}: must be an integer of at least 1")
