"""Ring: reduce-scatter, then all-gather, with every link busy at every moment."""

from __future__ import annotations

import torch

from lab.distributed.comm import Comm
from lab.exchange.bucket import Bucket
from lab.exchange.exchange import Exchange


class Ring(Exchange):
    """2(N-1) transfers of one N-th of the bucket (Patarasuk and Yuan, 2009, section 3).

    Chunk c is summed along the ring starting at rank c+1, so the order of its sum is fixed. Chunks
    may differ in length by one value; ranks beyond the number of values own an empty one.
    """

    needs_send_recv = True

    def average(self, bucket: Bucket, comm: Comm) -> None:
        rank, size = comm.rank, comm.size
        if size == 1:
            return
        chunks = list(torch.tensor_split(bucket.flat, size))
        received = torch.empty_like(chunks[0])
        after, before = (rank + 1) % size, (rank - 1) % size
        for step in range(1, size):
            outgoing, own = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
            incoming = received[: own.numel()]
            comm.send_recv(outgoing, after, incoming, before)
            own += incoming
        chunks[rank].div_(size)
        for step in range(size - 1):
            outgoing, own = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
            comm.send_recv(outgoing, after, own, before)
