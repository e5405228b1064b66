"""A Comm that sends nothing: to time what an exchange does by itself, and to count its bytes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lab.distributed.collective import Done, Handle
from lab.distributed.comm import Comm, Transfer


class SilentComm(Comm):
    """A rank of another Comm in whose collectives all other ranks seem to have the same tensors.

    So an exchange does all that it would do, with messages of the right form, except to wait.

    Args:
        like: the Comm to imitate; its own `traffic` is left alone.
    """

    backend = "silent"
    no_split = "a silent one has no groups"

    def __init__(self, like: Comm) -> None:
        super().__init__(like.rank, like.size)
        self.nodes, self.no_send_recv = like.nodes, like.no_send_recv

    def _iall_reduce(self, tensor: Tensor) -> Done:
        return Done()

    def _iall_gather(self, output: Tensor, tensor: Tensor) -> Done:
        output.view(self.size, -1).copy_(tensor.view(1, -1))
        return Done()

    def _iall_to_all(self, output: Tensor, tensor: Tensor) -> Done:
        output.copy_(tensor)
        return Done()

    def _ibroadcast(self, tensor: Tensor, source: int) -> Done:
        return Done()

    def _isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Handle:
        for tensor, _ in receives:
            tensor.zero_()
        return Done()
