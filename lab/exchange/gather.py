"""All-gathers of weights in bytes: ZeRO++'s qwZ (Wang et al. 2023, section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.codec.int8 import codec as int8
from lab.distributed.comm import Comm
from lab.exchange.bucket import ScratchBuffers

BLOCK = 1024  # values that share a smallest and a largest one


def gather_bytes(output: Tensor, own: Tensor, comm: Comm, buffers: ScratchBuffers) -> None:
    """Fill `output` with all ranks' `own`, rounded to a byte for each value, alike on all ranks.

    Args:
        output: float32 [N * n].
        own: float32 [n], may be a part of `output`.
        buffers: memory for messages.
    """
    byte = own.new_empty(0, dtype=torch.uint8)
    shape = -(-len(own) // BLOCK), int8.HEADER_BYTES + BLOCK
    sent = buffers["sent"].take(byte, *shape)
    received = buffers["received"].take(byte, comm.size, *shape)
    int8.encode(own, sent)
    comm.all_gather(received, sent)
    for records, part in zip(received, output.view(comm.size, -1), strict=True):
        int8.decode(records, part)
