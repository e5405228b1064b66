"""The definition of the 8-bit codec in plain torch; the C++ kernels give the same bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HEADER_BYTES = 8
LEVELS = 256
SMALLEST_STEP = torch.finfo(torch.float32).tiny  # a block of equal values has one too


def encode(values: Tensor, records: Tensor) -> None:
    """See lab.codec.int8.codec.encode."""
    blocks, tail = _in_blocks(values, records)
    _encode(blocks, records[: len(blocks)])
    if len(tail):  # padded with its last value, which keeps the range
        filled = F.pad(tail[None], (0, blocks.shape[1] - len(tail)), mode="replicate")
        _encode(filled, records[len(blocks) : len(blocks) + 1])


def decode(records: Tensor, out: Tensor) -> None:
    """See lab.codec.int8.codec.decode."""
    blocks, tail = _in_blocks(out, records)
    _decode(records[: len(blocks)], blocks)
    if len(tail):
        filled = out.new_empty(1, blocks.shape[1])
        _decode(records[len(blocks) : len(blocks) + 1], filled)
        tail.copy_(filled[0, : len(tail)])


def encode_mean(records: Tensor, mean: Tensor, out: Tensor) -> None:
    """See lab.codec.int8.codec.encode_mean."""
    decode(records[0], mean)
    other = torch.empty_like(mean)
    for of_rank in records[1:]:
        decode(of_rank, other)
        mean += other
    encode(mean.div_(len(records)), out)


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
    blocks.mul_(header[:, 1:]).add_(header[:, :1])  # two roundings, which addcmul may fuse
