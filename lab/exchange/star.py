"""Star: all gradients go to one rank, and the mean comes back."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.exchange.base import Rooted
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes


class Star(Rooted):
    """An exchange in which rank 0 receives all gradients, adds in rank order and returns the mean.

    As Torch7's nn.DataParallelTable does (accGradParameters onto the first GPU). Rank 0 moves N-1
    times as many bytes as the others.
    """

    def add_cost(self, costs: Costs) -> bool:
        costs.wire(costs.network.star(costs.num_bytes))
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        return Needs(scratch=0 if sizes.rank else 4 * sizes.largest)

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
