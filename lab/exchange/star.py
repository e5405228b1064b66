"""Star: everything to one rank and back."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.exchange.base import Rooted
from lab.exchange.bucket import GradBucket


class Star(Rooted):
    """All ranks send to rank 0, which adds in rank order and sends the mean back.

    Torch7's nn.DataParallelTable (accGradParameters onto the first GPU). Rank 0 moves N-1 times
    what the others do.
    """

    def to_root(self, bucket: GradBucket, comm: Comm) -> None:
        if comm.rank:
            comm.send(bucket.flat, 0)
            return
        received = torch.empty_like(bucket.flat)
        for source in range(1, comm.size):
            comm.recv(received, source)
            bucket.flat += received
        bucket.divide(bucket.flat, comm.size)

    def from_root(self, flat: Tensor, comm: Comm) -> None:
        if comm.rank:
            comm.recv(flat, 0)
            return
        for to in range(1, comm.size):
            comm.send(flat, to)
