"""One bit per value, and two reconstruction values for each row: the codec of 1-bit SGD."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.codec.base import Codec, Shapes
from lab.codec.kernels import Reading
from lab.codec.layout import RowBytes, Rows, spans
from lab.codec.signs import packed, unpacked
from lab.settings import checks

THRESHOLDS = ("zero", "mean")
GRANULARITIES = ("column", "block")


class OneBit(Codec):
    """The quantiser of 1-bit SGD (Seide et al., Interspeech 2014, section 3), as CNTK has it.

    `threshold="zero"` splits a row at 0 and reads each side as its mean; `"mean"` splits it at its
    mean m and reads m - d and m + d, with d the mean absolute deviation (ColumnQuantizer.h).

    Args:
        threshold: one of THRESHOLDS.
        granularity: the values that share two reconstruction values. "column": all weights into
            one output unit, a row of the [out, in*height*width] view, CNTK's column. "block":
            `block_size` values.
        block_size: values per block; the remainder of a parameter travels exactly.
        min_columns: with "column", parameters with shorter columns (biases, small kernels) travel
            exactly: their scales would outweigh the savings of bits.

    Raises:
        ValueError: an argument out of range.
    """

    name = "onebit"

    def __init__(
        self,
        threshold: str = "zero",
        granularity: str = "column",
        block_size: int = 1024,
        min_columns: int = 64,
    ) -> None:
        self.threshold = checks.one_of("exchange.threshold", threshold, THRESHOLDS)
        self.granularity = checks.one_of("exchange.granularity", granularity, GRANULARITIES)
        self.block_size = checks.whole("exchange.block_size", block_size, 8)
        self.min_columns = checks.whole("exchange.min_columns", min_columns, 1)
        self.option = int(threshold == "mean")

    def rows(self, shapes: Shapes) -> Iterator[Rows]:
        for name, start, stop in spans(shapes):
            shape, size = shapes[name], stop - start
            if self.granularity == "block":
                if whole := size // self.block_size * self.block_size:
                    yield Rows(start, start + whole, self.block_size)
            elif len(shape) > 1 and size and size // shape[0] >= self.min_columns:
                yield Rows(start, stop, size // shape[0])

    def left_out(self, key: str) -> str:
        """Say which values travel as they are. `key` names the settings of the exchange."""
        if self.granularity == "block":
            return f"what fills no block of {key}.block_size={self.block_size}"
        return f"vectors, and rows shorter than {key}.min_columns={self.min_columns}"

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(8, (columns + 7) // 8)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        scales = header.view(torch.float32)
        if self.option:
            mean = values.mean(dim=1, keepdim=True, dtype=torch.float64).float()
            upper = values >= mean
            distance = (values - mean).abs_().mean(dim=1, keepdim=True, dtype=torch.float64).float()
            torch.cat([mean - distance, mean + distance], dim=1, out=scales)
        else:
            upper = values >= 0
            for column, side in enumerate((~upper, upper)):
                total = torch.where(side, values, 0).sum(dim=1, dtype=torch.float64)
                # An empty side has the sum 0; dividing it by 1 makes its mean 0.
                scales[:, column] = total / side.sum(dim=1).clamp(min=1)
        payload.copy_(packed(upper))

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        scales = header.view(torch.float32)
        return torch.where(unpacked(payload, columns), scales[:, 1:], scales[:, :1])

    @property
    def reading(self) -> Reading:
        return Reading("mean" if self.option else "sides", 8)
