"""All-gathers of weights in bytes: ZeRO++'s qwZ (Wang et al. 2023, section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.levels import Int8
from lab.distributed.comm import Comm
from lab.exchange.bucket import Plans

CODEC = Int8(block_size=1024)


def gather_bytes(
    output: Tensor, own: Tensor, comm: Comm, plans: Plans, codec: Codec = CODEC
) -> None:
    """Fill `output` with all ranks' `own`, rounded to a byte for each value, alike on all ranks.

    Args:
        output: float32 [N * n].
        own: float32 [n], may be a part of `output`.
        plans: keeps layouts and messages for the next call.
    """
    if (key := (len(own), comm.size)) not in plans:
        layout = codec.layout_of_parts(len(own), comm.size)
        gathered = own.new_zeros(comm.size, layout.line_bytes, dtype=torch.uint8)
        finite = torch.ones((), dtype=torch.bool, device=own.device)
        plans[key] = layout, layout.part(0), gathered, torch.zeros_like(gathered[0]), finite
    layout, part, gathered, sent, finite = plans[key]
    kernels = codec.kernels(own.device)
    kernels.encode(part, own, None, sent)
    comm.all_gather(gathered, sent)
    kernels.add_up(layout, gathered.view(1, -1), output, 1, finite)
