"""The form of what takes the place of one of torch's collectives in an FSDP module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.sync.fsdp_drift import FsdpDrift


class UnitHook:
    """A collective of one FSDP module.

    Attributes:
        unit: name of the module.
        drift: watches what the collective delivers; None: nobody does.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.drift: FsdpDrift | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for what FSDP hands over or receives."""
        return torch.empty(*size, dtype=dtype, device=device)
