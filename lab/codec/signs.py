"""A sign for each value and one magnitude for all of a parameter: the codec of EF-SignSGD."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.codec.base import Codec, Shapes
from lab.codec.kernels import Reading
from lab.codec.layout import Layout, RowBytes, Rows, spans
from lab.settings import checks


class Signs(Codec):
    """Signs and the mean magnitude of a row (Karimireddy et al. 2019, Algorithm 1).

    Args:
        min_values: smaller parameters travel exactly.

    Raises:
        ValueError: `min_values` is no integer of at least 1.
    """

    name = "signs"

    def __init__(self, min_values: int = 4096) -> None:
        self.min_values = checks.whole("exchange.min_values", min_values, 1)

    def rows(self, shapes: Shapes) -> Iterator[Rows]:
        for _, start, stop in spans(shapes):
            if stop - start >= self.min_values:
                yield Rows(start, stop, stop - start)

    def also_moved(self, layout: Layout) -> float:
        """Count a second pass over gradient and residual: the magnitude must be known first."""
        return 8.0 * layout.num_values

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(4, (columns + 7) // 8)

    @property
    def reading(self) -> Reading:
        return Reading("signs", 8)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        magnitude = values.abs().mean(dim=1, keepdim=True, dtype=torch.float64)
        header.view(torch.float32).copy_(magnitude)
        payload.copy_(packed(torch.signbit(values)))

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        magnitude = header.view(torch.float32)
        return torch.where(unpacked(payload, columns), -magnitude, magnitude)


def packed(flags: Tensor) -> Tensor:
    """Pack bool [rows, columns] into uint8 [rows, ceil(columns / 8)]."""
    octets = F.pad(flags.view(torch.uint8), (0, -flags.shape[1] % 8)).unflatten(1, (-1, 8))
    return (octets << _shifts(flags)).sum(dim=2, dtype=torch.uint8)


def unpacked(octets: Tensor, columns: int) -> Tensor:
    """Return the flags of `packed`, bool [rows, columns]."""
    return (octets.unsqueeze(2) >> _shifts(octets) & 1).bool().flatten(1)[:, :columns]


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
