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
        buffers: memory for the messages.
        threshold: see lab.codec.onebit.codec.encode.
    """

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
        gathered: Message,
        between: Callable[[list[Tensor]], None] | None = None,
    ) -> Iterator[Collective]:
        """Fill `gathered` with the sum over the ranks of `values`, to be decoded.

        Args:
            values: float32 [rows, columns], one for each matrix; memory for sums afterwards.
            residuals: like `values`, replaced.
            shard_residuals: like this rank's rows of `values`, replaced.
            gathered: a line from each rank.
            between: changes the sums of this rank's rows in place before stage 2.
        """
        comm, size = self.comm, self.comm.size
        outgoing, received = self.message("outgoing", size), self.message("received", size)
        outgoing.encode(values, residuals, self.threshold)
        yield comm.iall_to_all(received.bytes, outgoing.bytes)
        # The values have been encoded: their memory is free for the sums.
        pairs = zip(values, self.matrices, strict=True)
        shards = [value[matrix.shard(comm.rank, size)] for value, matrix in pairs]
        reduced = self.message("reduced", 1)
        if between is None:
            reduced.encode_sum(received, shards, shard_residuals, self.threshold)
        else:
            received.add_up(shards)
            between(shards)
            reduced.encode(shards, shard_residuals, self.threshold)
        yield comm.iall_gather(gathered.bytes, reduced.bytes)

    def message(self, role: str, lines: int) -> Message:
        """Return a message with memory of its own for each role."""
        buffers = self._buffers[role]
        return Message.within(buffers, self.matrices, self.comm.size, lines, self._like)
