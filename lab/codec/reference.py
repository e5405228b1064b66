"""What the 1-bit codec does, in plain torch: this defines the result, and the fast twins repeat it.

The quantiser of 1-bit SGD (Seide et al., Interspeech 2014, section 3) as CNTK implements it
(ColumnQuantizer.h). A row here is what CNTK calls a column: the values that share a pair of
reconstruction values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def encode(
    gradient: Tensor, residual: Tensor | None, threshold: str, scales: Tensor, bits: Tensor
) -> None:
    """See lab.codec.onebit.encode."""
    values = gradient if residual is None else gradient + residual
    if threshold == "zero":
        upper_side = values >= 0
        _side_means(values, upper_side, out=scales)
    else:
        mean = values.mean(dim=1, keepdim=True, dtype=torch.float64).float()
        upper_side = values >= mean
        distance = (values - mean).abs_().mean(dim=1, keepdim=True, dtype=torch.float64).float()
        torch.cat([mean - distance, mean + distance], dim=1, out=scales)
    bits.copy_(_pack(upper_side))
    if residual is not None:
        torch.sub(values, _values(scales, bits, values.shape[1]), out=residual)


def decode(scales: Tensor, bits: Tensor, out: Tensor, add: bool) -> None:
    """See lab.codec.onebit.decode."""
    values = _values(scales, bits, out.shape[1])
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def _values(scales: Tensor, bits: Tensor, columns: int) -> Tensor:
    # lerp by exactly 0 or 1 gives exactly one or the other, in one vectorised pass.
    return torch.lerp(scales[:, 0:1], scales[:, 1:2], _unpack(bits, columns))


def _side_means(values: Tensor, upper_side: Tensor, out: Tensor) -> None:
    num_upper = upper_side.view(torch.uint8).sum(dim=1, dtype=torch.int64)
    num_lower = values.shape[1] - num_upper
    for side, (part, count) in enumerate(
        ((values.clamp(max=0), num_lower), (values.clamp(min=0), num_upper))
    ):
        # An empty side has the sum 0: dividing it by 1 makes its mean 0.
        out[:, side] = part.sum(dim=1, dtype=torch.float64) / count.clamp(min=1)


def _pack(flags: Tensor) -> Tensor:
    rows, columns = flags.shape
    padded = F.pad(flags.view(torch.uint8), (0, -columns % 8)).view(rows, (columns + 7) // 8, 8)
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
