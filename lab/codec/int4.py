"""Four bits per value between the smallest and the largest of its block.

A record encodes one block: its smallest value and the step between two levels, both float32, then
a byte for each two values, the first in the lower half. Values are rounded to the nearest of 16
levels, so a finite value is off by at most half a step, and a block of equal values is exact. A
block with a non-finite value decodes to non-finite values only.
"""

from __future__ import annotations

import torch
from torch import Tensor

HEADER_BYTES = 8
LEVELS = 16
SMALLEST_STEP = torch.finfo(torch.float32).tiny  # a block of equal values has one too


def encode(values: Tensor, records: Tensor) -> None:
    """Write `values` to the first of `records`.

    Args:
        values: float32 [n].
        records: uint8 [at least ceil(n / block), HEADER_BYTES + block / 2].
    """
    if not len(values):
        return
    blocks = _in_blocks(values, 2 * (records.shape[1] - HEADER_BYTES))
    used = records[: len(blocks)]
    header = used[:, :HEADER_BYTES].view(torch.float32)
    low, step = header[:, :1], header[:, 1:]
    low.copy_(blocks.amin(dim=1, keepdim=True))
    step.copy_((blocks.amax(dim=1, keepdim=True) - low).div_(LEVELS - 1).clamp_(SMALLEST_STEP))
    # Conversion to a byte truncates; with the half added it rounds.
    levels = blocks.sub_(low).div_(step).add_(0.5).to(torch.uint8)
    used[:, HEADER_BYTES:] = levels[:, ::2] | (levels[:, 1::2] << 4)


def decode(records: Tensor, out: Tensor) -> None:
    """Fill `out`, float32 [n], from the first of `records`."""
    block = 2 * (records.shape[1] - HEADER_BYTES)
    used = records[: -(-len(out) // block)]
    header, packed = used[:, :HEADER_BYTES].view(torch.float32), used[:, HEADER_BYTES:]
    values = out.new_empty(len(used), block)
    values[:, ::2] = packed & (LEVELS - 1)
    values[:, 1::2] = packed >> 4
    torch.addcmul(header[:, :1], values, header[:, 1:], out=values)
    out.copy_(values.view(-1)[: len(out)])


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """Return a copy of `values`, [blocks, block], filled up with the last one."""
    blocks = values.new_empty(-(-len(values) // block), block)
    flat = blocks.view(-1)
    flat[: len(values)] = values
    flat[len(values) :] = values[-1]
    return blocks
