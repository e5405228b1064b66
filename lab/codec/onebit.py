"""One bit per value and two reconstruction values per row.

The quantiser of 1-bit SGD (Seide et al., Interspeech 2014, section 3) as CNTK implements it
(ColumnQuantizer.h). A row here is what CNTK calls a column: the values that share a pair of
reconstruction values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

THRESHOLDS = ("zero", "mean")
SCALE_BYTES = 8  # two float32 reconstruction values for each row


def bit_bytes(columns: int) -> int:
    """Bytes that the packed bits of one row of `columns` values take."""
    return (columns + 7) // 8


def encode(values: Tensor, threshold: str) -> tuple[Tensor, Tensor]:
    """Quantise every row of `values` to its bits and two reconstruction values.

    `threshold="zero"` splits at 0 and reconstructs each side by its mean; `"mean"` splits at the
    row's mean m and reconstructs m - d and m + d, with d the mean absolute deviation. A row that
    holds a value that is not finite gets a scale that is not finite.

    Args:
        values: float32 [rows, columns].
        threshold: one of THRESHOLDS.

    Returns:
        scales: float32 [rows, 2], what bit 0 and bit 1 stand for.
        bits: uint8 [rows, bit_bytes(columns)], least significant bit first.
    """
    if threshold == "zero":
        upper_side = values >= 0
        scales = _side_means(values, upper_side)
    else:
        mean = values.mean(dim=1, keepdim=True)
        upper_side = values >= mean
        deviation = (values - mean).abs_().mean(dim=1, keepdim=True)
        scales = torch.cat([mean - deviation, mean + deviation], dim=1)
    return scales, _pack(upper_side)


def decode(scales: Tensor, bits: Tensor, columns: int) -> Tensor:
    """The values that `encode` stands for: float32 [rows, columns]."""
    # lerp by exactly 0 or 1 gives exactly one or the other, in one vectorised pass.
    return torch.lerp(scales[:, 0:1], scales[:, 1:2], _unpack(bits, columns))


def _side_means(values: Tensor, upper_side: Tensor) -> Tensor:
    num_upper = upper_side.view(torch.uint8).sum(dim=1, dtype=torch.int32)
    num_lower = values.shape[1] - num_upper
    # An empty side has the sum 0: dividing it by 1 makes its mean 0.
    lower = values.clamp(max=0).sum(dim=1) / num_lower.clamp(min=1)
    upper = values.clamp(min=0).sum(dim=1) / num_upper.clamp(min=1)
    return torch.stack([lower, upper], dim=1)


def _pack(flags: Tensor) -> Tensor:
    rows, columns = flags.shape
    padded = F.pad(flags.view(torch.uint8), (0, -columns % 8)).view(rows, bit_bytes(columns), 8)
    packed = padded[:, :, 0].clone()
    for bit in range(1, 8):
        packed |= padded[:, :, bit] << bit
    return packed


def _unpack(bits: Tensor, columns: int) -> Tensor:
    """0.0 or 1.0 for each bit: float32 [rows, columns]."""
    shifts = torch.arange(8, device=bits.device)
    bits_of_byte = (torch.arange(256, device=bits.device).unsqueeze(1) >> shifts & 1).float()
    flags = bits_of_byte.index_select(0, bits.flatten().int())
    return flags.view(len(bits), 8 * bits.shape[1])[:, :columns]
