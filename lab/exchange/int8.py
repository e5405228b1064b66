"""ByteGrad: eight bits per value, in two stages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.codec.int8 import codec as int8
from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket


class Int8(Staged):
    """Two-stage 8-bit averaging (ByteGrad of Bagua: Gan et al., VLDB 2022).

    1. Each rank encodes its bucket, block by block; the r-th part of the blocks goes to rank r.
    2. Rank r decodes these parts, adds them in rank order, divides by N, encodes the mean and sends
       it to all ranks, which decode it.

    A rank sends 2(N-1)/N bytes per value, plus 8 per block at each stage. There is no error
    feedback, as ByteGrad has none: a delivered value is off by at most half a level of its block in
    the mean, plus the mean of half a level in each rank's gradient. A block that is non-finite on
    one rank becomes non-finite on all.

    Args:
        block_size: values that share a smallest and a largest one; they may belong to several
            parameters.

    Raises:
        ValueError: `block_size` is not a positive multiple of 4, which aligns the headers.
    """

    exact = False

    def __init__(self, block_size: int = 1024) -> None:
        if not isinstance(block_size, int) or block_size < 4 or block_size % 4:
            raise ValueError(f"exchange.block_size={block_size}: must be a multiple of 4 above 0")
        self.block_size = block_size

    def error_bound(self, largest: float, size: int) -> float:
        half = largest / (int8.LEVELS - 1)  # of a level, where values fill [-largest, largest]
        return half + half * (1 + 1 / (int8.LEVELS - 1))

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        flat, size = bucket.flat, comm.size
        if not len(flat):
            return
        num_blocks = -(-len(flat) // self.block_size)
        part_blocks = -(-num_blocks // size)
        part = (part_blocks, int8.HEADER_BYTES + self.block_size)

        def message(role: str, *shape: int) -> Tensor:
            return bucket.buffers[role].take(flat.new_empty(0, dtype=torch.uint8), *shape)

        outgoing, received = message("outgoing", size, *part), message("received", size, *part)
        outgoing.flatten(0, 1)[num_blocks:].zero_()  # the last parts may end in unused records
        int8.encode(flat, outgoing.flatten(0, 1))
        yield comm.iall_to_all(received, outgoing)

        # The gradient has been encoded: its memory is free for this rank's part of the mean.
        part_values = part_blocks * self.block_size
        mean = flat[comm.rank * part_values : (comm.rank + 1) * part_values]
        reply = message("reply", *part)
        reply[-(-len(mean) // self.block_size) :].zero_()
        int8.encode_mean(received, mean, reply)
        yield comm.iall_gather(received, reply)
        int8.decode(received.flatten(0, 1), flat)
