"""The definition of the 1-bit codec in plain torch; the fast kernels give the same results.

The quantiser of 1-bit SGD (Seide et al., Interspeech 2014, section 3) as CNTK implements it
(ColumnQuantizer.h). A row here is a column in CNTK: the values that share a pair of
reconstruction values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def encode(
    gradient: Tensor, residual: Tensor | None, threshold: str, scales: Tensor, bits: Tensor
) -> None:
    """See lab.codec.onebit.codec.encode."""
    for line, rows in enumerate(gradient.split(scales.shape[1])):
        kept = None if residual is None else residual[line * scales.shape[1] :][: len(rows)]
        _encode(rows, kept, threshold, scales[line, : len(rows)], bits[line, : len(rows)])


def decode(scales: Tensor, bits: Tensor, out: Tensor, add: bool) -> None:
    """See lab.codec.onebit.codec.decode."""
    for line, rows in enumerate(out.split(scales.shape[1])):
        values = _values(scales[line, : len(rows)], bits[line, : len(rows)], out.shape[1])
        if add:
            rows.add_(values)
        else:
            rows.copy_(values)


def reduce(
    scales: Tensor,
    bits: Tensor,
    total: Tensor,
    residual: Tensor | None,
    threshold: str,
    out_scales: Tensor,
    out_bits: Tensor,
) -> None:
    """See lab.codec.onebit.codec.reduce."""
    for rank, (of_scales, of_bits) in enumerate(zip(scales, bits, strict=True)):
        decode(of_scales[None], of_bits[None], total, add=rank > 0)
    _encode(total, residual, threshold, out_scales, out_bits)


def _encode(
    gradient: Tensor, residual: Tensor | None, threshold: str, scales: Tensor, bits: Tensor
) -> None:
    """Encode one line's rows: `scales` [rows, 2], `bits` [rows, bytes]."""
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


def _values(scales: Tensor, bits: Tensor, columns: int) -> Tensor:
    return torch.where(_unpack(bits, columns), scales[:, 1:2], scales[:, 0:1])


def _side_means(values: Tensor, upper_side: Tensor, out: Tensor) -> None:
    for column, side in enumerate((~upper_side, upper_side)):
        total = torch.where(side, values, 0).sum(dim=1, dtype=torch.float64)
        # An empty side has the sum 0; dividing it by 1 makes its mean 0.
        out[:, column] = total / side.sum(dim=1).clamp(min=1)


def _pack(flags: Tensor) -> Tensor:
    columns = flags.shape[1]
    bytes_of_flags = F.pad(flags.view(torch.uint8), (0, -columns % 8)).unflatten(1, (-1, 8))
    return (bytes_of_flags << _shifts(flags)).sum(dim=2, dtype=torch.uint8)


def _unpack(bits: Tensor, columns: int) -> Tensor:
    """Return bool [rows, columns]."""
    return (bits.unsqueeze(2) >> _shifts(bits) & 1).bool().flatten(1)[:, :columns]


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
