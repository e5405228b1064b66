"""Data and models that do not fit the task, and one that does, named by `_target_` in tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lab.data import TensorData
from lab.data.synthetic import synthetic


def a_class_too_many(*, seed: int, device: torch.device, **_: Any) -> TensorData:
    """Return data whose last test target is beyond its ten classes."""
    data = synthetic(seed=seed, device=device, shape=(1, 16, 16), num_images=64)
    data.targets()[1][-1] = 10
    return data


def a_word_for_each_pixel(*, seed: int, device: torch.device, **_: Any) -> TensorData:
    """Return data with targets [samples, positions], as a language model has them."""
    part = torch.zeros(64, 1, 16, 16, device=device), torch.zeros(64, 256).long().to(device)
    return TensorData(part, part, unit="sequence", num_classes=10)


def one_output_too_many(*, input_shape: tuple[int, ...], output_size: int) -> nn.Module:
    """Return a model with one output too many."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), output_size + 1))


def no_module(*, output_size: int) -> tuple[int, ...]:
    """Return something else than a model."""
    return (output_size,)


def embedded(*, input_shape: tuple[int, ...], output_size: int, sparse: bool) -> nn.Module:
    """Return a model that looks up each pixel's level."""
    table = nn.EmbeddingBag(17, output_size, mode="sum", sparse=sparse)
    return nn.Sequential(nn.Flatten(), Levels(), table)


class Levels(nn.Module):
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map values from -1 to 1 [batch, pixels] to levels from 0 to 16."""
        return (8 * pixels + 8).long().clamp(0, 16)


class Bigram(nn.Sequential):
    """Predict the next token from the last one: [batch, context] -> [batch, context, vocabulary].

    Args:
        vocabulary: number of token ids.
        width: of a token's vector.
    """

    def __init__(self, *, vocabulary: int, width: int = 16) -> None:
        super().__init__(nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary))
