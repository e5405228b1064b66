"""Eight bits per value between the smallest and the largest of its block: ByteGrad's codec.

A record encodes one block: its smallest value and the step between two levels, both float32, then
a byte for each value (as Bagua's MinMaxUInt8, which sends the largest value instead of the step).
Values are rounded to the nearest level, halves upwards, so a finite value is off by at most half a
step, and a block of equal values is exact. A block with a non-finite value decodes to non-finite
values only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HEADER_BYTES = 8
LEVELS = 256
SMALLEST_STEP = torch.finfo(torch.float32).tiny  # a block of equal values has one too


def encode(values: Tensor, records: Tensor) -> None:
    """Write `values` to the first of `records`.

    Args:
        values: float32 [n], overwritten: levels are computed in their memory.
        records: uint8 [at least ceil(n / block), HEADER_BYTES + block].
    """
    blocks, tail = _in_blocks(values, records)
    _encode(blocks, records[: len(blocks)])
    if len(tail):  # padded with its last value, which keeps the range
        filled = F.pad(tail[None], (0, blocks.shape[1] - len(tail)), mode="replicate")
        _encode(filled, records[len(blocks) : len(blocks) + 1])


def decode(records: Tensor, out: Tensor) -> None:
    """Fill `out`, float32 [n], from the first of `records`."""
    blocks, tail = _in_blocks(out, records)
    _decode(records[: len(blocks)], blocks)
    if len(tail):
        filled = out.new_empty(1, blocks.shape[1])
        _decode(records[len(blocks) : len(blocks) + 1], filled)
        tail.copy_(filled[0, : len(tail)])


def _in_blocks(values: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole blocks of `values`, [blocks, block], and the tail, [less than a block]."""
    block = records.shape[1] - HEADER_BYTES
    whole = len(values) // block
    return values[: whole * block].view(whole, block), values[whole * block :]


def _encode(blocks: Tensor, records: Tensor) -> None:
    header = records[:, :HEADER_BYTES].view(torch.float32)
    low, step = header[:, :1], header[:, 1:]
    low.copy_(blocks.amin(dim=1, keepdim=True))
    step.copy_((blocks.amax(dim=1, keepdim=True) - low).div_(LEVELS - 1).clamp_(SMALLEST_STEP))
    half = torch.full((), 0.5, device=blocks.device)
    # Conversion to a byte truncates; with the half added it rounds.
    torch.addcdiv(half, blocks.sub_(low), step, out=blocks)
    records[:, HEADER_BYTES:].copy_(blocks)


def _decode(records: Tensor, blocks: Tensor) -> None:
    header = records[:, :HEADER_BYTES].view(torch.float32)
    blocks.copy_(records[:, HEADER_BYTES:])
    torch.addcmul(header[:, :1], blocks, header[:, 1:], out=blocks)
