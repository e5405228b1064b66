"""Ring: reduce-scatter, then all-gather, with every link busy at every moment."""

from __future__ import annotations

from collections.abc import Iterator

from lab.codec.scratch import ScratchBuffer
from lab.distributed.comm import Comm
from lab.exchange import pipeline
from lab.exchange.base import ADDED, Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.chunks import LAG, ChunkMB, check_chunk_mb, chunk_mb_over
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.pipeline import Tick


class Ring(Exchange):
    """2(N-1) steps that move one N-th of the bucket each (Patarasuk and Yuan, 2009, section 3).

    Part p is summed along the ring starting at rank p+1, so the order of its sum is fixed. A part
    travels in pieces: one is added while the next ones are on their way. Parts may differ in length
    by one value; ranks beyond the number of values own an empty one. Scratch: three pieces.

    Args:
        chunk_mb: largest piece in MiB, or one for each library. None: a part is
            one piece.

    Raises:
        ValueError: a chunk_mb that is not above 0.
    """

    dtypes = ADDED
    needs_send_recv = True
    takes_divided = True

    def __init__(self, chunk_mb: ChunkMB = 4) -> None:
        check_chunk_mb(chunk_mb)
        self.chunk_mb = chunk_mb
        self._buffers = ScratchBuffer()

    def add_cost(self, costs: Costs) -> bool:
        costs.wire(costs.network.ring(costs.num_bytes, costs.chunk_bytes(self.chunk_mb)))
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        return Needs(kept=sizes.chunks(sizes.largest / sizes.N, self.chunk_mb))

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if comm.size > 1:
            chunk_mb = chunk_mb_over(self.chunk_mb, comm.backend)
            pipeline.run(comm, self._ticks(bucket, comm.rank, comm.size, chunk_mb))

    def _ticks(
        self, bucket: GradBucket, rank: int, size: int, chunk_mb: float | None
    ) -> Iterator[Tick]:
        parts = bucket.flat.tensor_split(size)
        num_pieces = pipeline.num_chunks(parts[0], chunk_mb)
        pieces = [part.tensor_split(num_pieces) for part in parts]
        arrived = self._buffers.take(bucket.flat, LAG, pieces[0][0].numel())
        after, before = (rank + 1) % size, (rank - 1) % size
        step_ticks = max(num_pieces, LAG)  # a piece that arrives in one step leaves in the next
        for time in range(2 * (size - 1) * step_ticks):
            step, index = divmod(time - LAG, step_ticks)
            if 0 <= step < size - 1 and index < num_pieces:
                own = pieces[(rank - step - 2) % size][index]
                own += arrived[time % LAG, : own.numel()]
                if step == size - 2:
                    bucket.divide(own, size)
            step, index = divmod(time, step_ticks)
            if index >= num_pieces:
                yield [], []
                continue
            outgoing, own = (pieces[(rank - step - back) % size][index] for back in (1, 2))
            incoming = arrived[time % LAG, : own.numel()] if step < size - 1 else own
            yield [(outgoing, after)], [(incoming, before)]
