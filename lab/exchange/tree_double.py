"""Double tree: two binary trees at once, each with half of the bucket."""

from __future__ import annotations

from functools import partial

from lab.codec.scratch import ScratchBuffer
from lab.distributed.comm import Comm
from lab.exchange import pipeline
from lab.exchange.base import ADDED, Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.chunks import ChunkMB, check_chunk_mb, chunk_mb_over
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.topology import in_order_node
from lab.exchange.tree import up_and_down


class DoubleTree(Exchange):
    """Reduce and broadcast on two complementary binary trees (Sanders, Speck and Träff, 2009).

    An inner rank of one tree is a leaf of the other, so for any N a rank sends at most two buckets,
    over log2(N) hops each way (as in NCCL since 2.4). Each tree takes half of the bucket, in chunks
    that go up and down while others arrive. Sums are taken in the order of the children. Scratch:
    three chunks for each of at most two children.

    Args:
        chunk_mb: largest chunk in MiB, or one for each library. None: a half is
            one chunk.

    Raises:
        ValueError: a chunk_mb that is not above 0.
    """

    dtypes = ADDED
    needs_send_recv = True
    takes_divided = True

    def __init__(self, chunk_mb: ChunkMB = 4) -> None:
        check_chunk_mb(chunk_mb)
        self.chunk_mb = chunk_mb
        self._buffers = ScratchBuffer(), ScratchBuffer()  # one per tree; a leaf's stays empty

    def add_cost(self, costs: Costs) -> bool:
        chunk_bytes = costs.chunk_bytes(self.chunk_mb)
        costs.wire(costs.network.tree_double(costs.num_bytes, chunk_bytes))
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        nodes = [in_order_node(sizes.rank, sizes.N, tree) for tree in (0, 1)]
        half = sizes.largest / 2
        kept = sum(sizes.chunks(half, self.chunk_mb, len(node.children)) for node in nodes)
        return Needs(kept)

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if comm.size == 1:
            return
        halves = bucket.flat.tensor_split(2)
        chunk_mb = chunk_mb_over(self.chunk_mb, comm.backend)
        num_chunks = pipeline.num_chunks(halves[0], chunk_mb)
        first, second = (
            up_and_down(
                half.tensor_split(num_chunks),
                in_order_node(comm.rank, comm.size, tree),
                comm.size,
                partial(bucket.divide, size=comm.size),
                self._buffers[tree],
            )
            for tree, half in enumerate(halves)
        )
        pipeline.run(comm, first, second)
