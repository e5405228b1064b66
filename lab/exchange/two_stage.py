"""A sum over the ranks in two stages of one bit per value, both with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from lab.codec.onebit.message import Matrix, Message
from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.exchange.bucket import ScratchBuffers

Residuals = Sequence[Tensor | None]  # [rows, columns], one for each matrix; None: no error feedback


class TwoStageSum:
    """Quantised reduce-scatter and all-gather of matrices (Seide et al. 2014, section 3).

    1. Each rank quantises its matrices and their residuals, and keeps the errors as new residuals.
       Row shard r of every rank goes to rank r, which decodes and sums them in rank order.
    2. Rank r quantises the sum and the shard residual, and keeps that error. The bits go to all
       ranks, which decode all shards.

    So delivered + residuals = true sums at any time.

    Args:
        matrices: their shapes; rows are sharded.
        like: tensor on the device.
        buffers: memory for the four messages.
        threshold: see lab.codec.onebit.codec.encode.

    Attributes:
        finite: bool [], whether all delivered values are finite; set by `stages`.
    """

    finite: Tensor

    def __init__(
        self,
        matrices: Sequence[Matrix],
        comm: Comm,
        like: Tensor,
        buffers: ScratchBuffers,
        threshold: str = "zero",
    ) -> None:
        self.matrices, self.comm, self.threshold = matrices, comm, threshold
        self._like, self._buffers = like, buffers

    def stages(
        self,
        values: Sequence[Tensor],
        residuals: Residuals,
        shard_residuals: Residuals,
        *,
        divisor: int = 1,
        between: Callable[[list[Tensor]], None] | None = None,
    ) -> Iterator[Collective]:
        """Replace `values` by their sum over the ranks, divided by `divisor`.

        Args:
            values: float32 [rows, columns], one for each matrix.
            residuals: like `values`, replaced.
            shard_residuals: like this rank's rows of `values`, replaced.
            between: changes the sums of this rank's rows in place before stage 2.
        """
        comm, size = self.comm, self.comm.size
        outgoing, received = self._message("outgoing", size), self._message("received", size)
        outgoing.encode(values, residuals, self.threshold)
        yield comm.iall_to_all(received.bytes, outgoing.bytes)
        # The values have been encoded: their memory is free for the sums.
        pairs = zip(values, self.matrices, strict=True)
        shards = [value[matrix.shard(comm.rank, size)] for value, matrix in pairs]
        reduced, gathered = self._message("reduced", 1), self._message("gathered", size)
        if between is None:
            reduced.encode_sum(received, shards, shard_residuals, self.threshold)
        else:
            received.add_up(shards)
            between(shards)
            reduced.encode(shards, shard_residuals, self.threshold)
        yield comm.iall_gather(gathered.bytes, reduced.bytes)
        self.finite = gathered.scales().isfinite().all()
        if divisor != 1:
            gathered.scales().div_(divisor)
        gathered.decode(values)

    def _message(self, role: str, lines: int) -> Message:
        return Message(self.matrices, self.comm.size, lines, self._like, self._buffers[role])
