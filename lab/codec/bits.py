"""Flags of rows, eight in a byte, the first in its lowest bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def packed(flags: Tensor) -> Tensor:
    """Pack bool [rows, columns] into uint8 [rows, ceil(columns / 8)]."""
    octets = F.pad(flags.view(torch.uint8), (0, -flags.shape[1] % 8)).unflatten(1, (-1, 8))
    return (octets << _shifts(flags)).sum(dim=2, dtype=torch.uint8)


def unpacked(octets: Tensor, columns: int) -> Tensor:
    """Return the flags of `packed`, bool [rows, columns]."""
    return (octets.unsqueeze(2) >> _shifts(octets) & 1).bool().flatten(1)[:, :columns]


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
