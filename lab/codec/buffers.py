"""Memory that an exchange keeps from one call to the next."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Buffers:
    """Room for what comes and goes: the system takes its time over fresh pages."""

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Uninitialised, with the dtype and device of `like`; what was taken before is void."""
        num_values = math.prod(shape)
        fits = self._room.dtype == like.dtype and self._room.device == like.device
        if not fits or self._room.numel() < num_values:
            self._room = like.new_empty(num_values)
        return self._room[:num_values].view(shape)
