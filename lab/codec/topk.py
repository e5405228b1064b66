"""The values of largest magnitude, each with its index: the codec of top-k."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from lab.codec.base import Codec, Shapes
from lab.codec.layout import Layout, RowBytes, Rows, spans
from lab.settings import checks

INDEX_BYTES = VALUE_BYTES = 4
LINE_BYTES = 64  # of a cache, which a value alone moves in each direction


class TopK(Codec):
    """A share of the values of each parameter, those of largest magnitude; others are read as 0.

    NaN is the largest of all. Of equal magnitudes, which are taken is not defined.

    Args:
        ratio: the share, above 0 and at most 1; rounded up.

    Raises:
        ValueError: `ratio` is out of range.
    """

    name = "topk"
    in_torch = 16.0, 4.0

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = checks.number("exchange.ratio", ratio, above=0, at_most=1)
        (self.option,) = struct.unpack("<q", struct.pack("<d", ratio))

    def rows(self, shapes: Shapes) -> Iterator[Rows]:
        for _, start, stop in spans(shapes):
            if start < stop:
                yield Rows(start, stop, stop - start)

    def also_moved(self, layout: Layout) -> float:
        """Count what candidates move: each is read and written several times, a line at a time."""
        sent = layout.num_bytes / (INDEX_BYTES + VALUE_BYTES)
        return (2 * LINE_BYTES + 72) * sent

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(0, (INDEX_BYTES + VALUE_BYTES) * math.ceil(self.ratio * columns))

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        indices, kept = self._parts(payload)
        chosen = values.abs().topk(indices.shape[1], sorted=False).indices.sort().values
        indices.copy_(chosen)
        kept.copy_(values.gather(1, chosen))

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        indices, kept = self._parts(payload)
        out = kept.new_zeros(len(kept), columns)
        return out.scatter_(1, indices.long(), kept)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices, int32, and values, float32, of a payload: [rows, k] each."""
        words = payload.view(torch.int32)
        half = words.shape[1] // 2
        return words[:, :half], words[:, half:].view(torch.float32)
