"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BASE = 10_000.0


class Rotary(nn.Module):
    """Turns pairs of values by angles proportional to the position (Su et al. 2021, section 3.2).

    Then the product of a query and a key depends on their contents and the distance between them,
    not on where they are. Value i is paired with i + size/2, in every pair at another frequency.

    Args:
        context: number of positions.
        size: values of one head's query or key; even.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, size: int) -> None:
        super().__init__()
        frequencies = BASE ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """Turn vectors [..., length, size], the first of which is at position 0."""
        length = vectors.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        first, second = vectors.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
        return turned.type_as(vectors)
