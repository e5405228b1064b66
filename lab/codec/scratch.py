"""Scratch memory that an exchange keeps from one call to the next."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class ScratchBuffer:
    """A reusable scratch buffer: avoids page faults from fresh allocations."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Return uninitialised memory like `like`; earlier memory becomes invalid."""
        num_values = math.prod(shape)
        fits = self._memory.dtype == like.dtype and self._memory.device == like.device
        if not fits or self._memory.numel() < num_values:
            self._memory = like.new_empty(num_values)
        return self._memory[:num_values].view(shape)
