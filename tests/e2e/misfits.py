"""Data and models that do not fit the task, and one that does, named by `_target_` in tests."""

from __future__ import annotations

import math

import torch
from torch import nn


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
