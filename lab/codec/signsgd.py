"""One sign bit per value, and one magnitude for all: the codec of EF-SignSGD.

It decodes as 1-bit SGD does, with the same two reconstruction values for all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.codec.onebit import codec as onebit

# Eight bytes of 0 or 1, read as one integer and multiplied by this, leave their bits in the highest
# byte, the first bit lowest.
GATHER_BITS = 0x0102040810204080
ROW_VALUES = 8192  # the 1-bit codec divides rows among threads: enough rows, not too short


def bit_bytes(num_values: int) -> int:
    """Return the bytes of `num_values` packed signs."""
    return (num_values + 7) // 8


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode `values`, float32 [n], as a magnitude and signs.

    Returns:
        The mean magnitude, float32 [], non-finite if a value is; and the sign bits, 1 for negative
        values, least significant first, uint8 [bit_bytes(n)].
    """
    flags = torch.zeros(8 * bit_bytes(len(values)), dtype=torch.bool, device=values.device)
    torch.signbit(values, out=flags[: len(values)])
    words = flags.view(torch.int64).mul_(GATHER_BITS)
    bits = words.view(torch.uint8)[7::8].contiguous()
    return torch.linalg.vector_norm(values, 1) / len(values), bits


def decode(magnitude: Tensor, bits: Tensor, out: Tensor, add: bool = False) -> None:
    """Reconstruct values into `out`, float32 [n], or add them there."""
    rows = len(out) // ROW_VALUES
    whole = rows * ROW_VALUES
    scales = torch.stack([magnitude, -magnitude]).repeat(1, rows + 1, 1)
    if rows:
        of_rows = bits[: whole // 8].view(1, rows, -1)
        onebit.decode(scales[:, :rows], of_rows, out[:whole].view(rows, -1), add)
    if whole < len(out):
        onebit.decode(scales[:, rows:], bits[None, None, whole // 8 :], out[None, whole:], add)
