"""Comm over torch.distributed: NCCL on GPUs, Gloo on CPUs."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lab.distributed.comm import Comm

# torch 2.13 renamed the one that older releases, down to our oldest, know by another name.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchComm(Comm):
    """The ranks of a torch process group.

    Under NCCL every call returns once the current stream waits for it; under Gloo, once it is
    complete.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def _all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> None:
        all_gather_flat(output.view(-1), tensor.view(-1), group=self.group)

    def _all_to_all(self, output: Tensor, tensor: Tensor) -> None:
        dist.all_to_all_single(output, tensor, group=self.group)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, group=self.group, group_src=source)

    def _send(self, tensor: Tensor, to: int) -> None:
        dist.send(tensor, group=self.group, group_dst=to)

    def _recv(self, tensor: Tensor, source: int) -> None:
        dist.recv(tensor, group=self.group, group_src=source)

    def _send_recv(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        both = [
            dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
