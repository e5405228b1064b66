"""The definition of the sign codec in plain torch; the C++ kernels give the same bits.

It decodes as 1-bit SGD does, with the same two reconstruction values for all rows, so that on GPUs
the 1-bit codec's kernels decode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.codec.onebit import codec as onebit

# Eight bytes of 0 or 1, read as one integer and multiplied by this, leave their bits in the highest
# byte, the first bit lowest.
GATHER_BITS = 0x0102040810204080
ROW_VALUES = 8192  # the 1-bit codec divides rows among threads: enough rows, not too short


def encode(gradient: Tensor, residual: Tensor | None, magnitude: Tensor, bits: Tensor) -> None:
    """See lab.codec.signs.codec.encode."""
    values = gradient if residual is None else residual.add_(gradient)
    magnitude.copy_(values.abs().mean(dtype=torch.float64))
    bits.copy_(_pack(torch.signbit(values)))
    if residual is not None:
        residual -= torch.copysign(magnitude, values, out=gradient)


def decode(magnitudes: Tensor, bits: Tensor, out: Tensor) -> None:
    """See lab.codec.signs.codec.decode."""
    for rank, (magnitude, of_rank) in enumerate(zip(magnitudes, bits, strict=True)):
        _decode(magnitude, of_rank, out, add=rank > 0)


def _pack(flags: Tensor) -> Tensor:
    padded = torch.zeros(-(-len(flags) // 8) * 8, dtype=torch.bool, device=flags.device)
    padded[: len(flags)] = flags
    return padded.view(torch.int64).mul_(GATHER_BITS).view(torch.uint8)[7::8]


def _decode(magnitude: Tensor, bits: Tensor, out: Tensor, add: bool) -> None:
    rows = len(out) // ROW_VALUES
    whole = rows * ROW_VALUES
    scales = torch.stack([magnitude, -magnitude]).repeat(1, rows + 1, 1)
    if rows:
        of_rows = bits[: whole // 8].view(1, rows, -1)
        onebit.decode(scales[:, :rows], of_rows, out[:whole].view(rows, -1), add)
    if whole < len(out):
        onebit.decode(scales[:, rows:], bits[None, None, whole // 8 :], out[None, whole:], add)
