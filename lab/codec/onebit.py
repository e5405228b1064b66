"""One bit per value, and two reconstruction values for each row: the codec of 1-bit SGD."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lab.codec.base import Codec, Kernels, Shapes
from lab.codec.build import warn_slow
from lab.codec.layout import RowBytes, Rows, lay_out, spans
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
    in_torch = None

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

    def gpu_kernels(self, device: torch.device) -> Kernels | None:
        return triton_kernels(bool(self.option), device)


@functools.cache
def triton_kernels(split_at_mean: bool, device: torch.device) -> Kernels | None:
    """Return Triton's kernels if they run on `device`; otherwise warn and return None.

    Triton compiles at a kernel's first launch, for which it needs a C compiler and Python's
    headers, and it supports only some GPUs and drivers: so only a trial shows whether it works.

    Raises:
        torch.OutOfMemoryError: the trial does not fit; not a fault of Triton's.
    """
    try:
        gpu = importlib.import_module("lab.codec.onebit_gpu")
        kernels = gpu.Triton(split_at_mean)
        _try(kernels, gpu.WIDTHS, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and drivers raise many types
        lines = str(error).splitlines()
        line = next((line for line in lines if line.strip()), "no reason given")
        name = type(error).__name__
        warn_slow(f"1-bit codec: Triton does not work on {device} ({name}: {line.strip()})")
        return None
    return kernels


def _try(kernels: Kernels, widths: tuple[int, ...], device: torch.device) -> None:
    """Launch each kernel once, on a row of zeros of each width, and on one that is longer."""
    rows, start = list[Rows](), 0
    for columns in (*widths, widths[-1] + 16):
        rows.append(Rows(start, start + columns, columns))
        start += columns
    layout = lay_out(rows, start + 1, 1, OneBit().row_bytes)
    values, finite = torch.zeros(start + 1, device=device), torch.ones((), device=device).bool()
    message = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    kernels.encode(layout, values, values.clone(), message)
    kernels.reduce(layout, message[None], values.clone(), message.clone())
    kernels.add_up(layout, message[None], values, 1, finite)
