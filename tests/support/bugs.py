"""A user's code with bugs, named by `_target_` in tests. Each fails with a ZeroDivisionError."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lab.data import GlobalSampler, TensorData
from lab.data.synthetic import synthetic
from lab.task.tasks import Classification

ZERO = 0


class Net(nn.Sequential):
    """A linear model."""

    def __init__(self, *, input_shape: tuple[int, ...], output_size: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(input_shape), output_size))


class Quits(Net):
    """A model that ends the process, as if all were well."""

    def __init__(self, *, input_shape: tuple[int, ...], output_size: int) -> None:
        sys.exit(0)


class InConstructor(Net):
    """A model that cannot be constructed."""

    def __init__(self, *, input_shape: tuple[int, ...], output_size: int) -> None:
        super().__init__(input_shape=input_shape, output_size=output_size)
        self.width = math.floor("wide")  # type: ignore[arg-type]


class InForward(Net):
    """A model that fails when it is trained, on the last rank."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs, on other ranks."""
        if self.training and int(os.environ.get("RANK", "0")) == 1:
            return input / (1 // ZERO)
        return super().forward(input)


class InDataSet(TensorData):
    """Data whose third batch cannot be read."""

    def __init__(self, *, seed: int, device: torch.device, **_: Any) -> None:
        data = synthetic(seed=seed, device=device, shape=(1, 16, 16), num_images=64)
        super().__init__(data._train, data._test, unit="image", num_classes=10)

    def train_batches(self, sampler: GlobalSampler) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield two batches."""
        for number, batch in enumerate(super().train_batches(sampler)):
            yield batch if number < 2 else (batch[0] / (1 // ZERO), batch[1])


class InMetrics(Classification):
    """A task that learns, but cannot be evaluated."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return nothing."""
        return super().sums(outputs, targets) / (1 // ZERO)
