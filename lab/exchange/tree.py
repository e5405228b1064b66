"""Reduction tree: the exchange whose 2*log2(N) transfers Kim et al. found on the critical path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lab.codec.scratch import ScratchBuffer
from lab.distributed.comm import Comm
from lab.exchange import pipeline
from lab.exchange.base import Rooted
from lab.exchange.bucket import GradBucket
from lab.exchange.chunks import LAG, ChunkMB, check_chunk_mb, chunk_mb_over
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.pipeline import Tick
from lab.exchange.topology import Node, binomial_node


class Tree(Rooted):
    """Reduce up a binomial tree, divide at the root, broadcast down the same tree.

    Store and forward of whole buckets: the critical path is 2*ceil(log2 N) transfers of the bucket
    (Kim et al., ISPASS 2017, slide 25; Caffe's P2PSync; Paleo's "Tree"). A rank sends the bucket
    once to its parent and once to each child. Sums are taken in the order of the children.
    Scratch: one bucket, or three chunks for each child.

    Args:
        chunk_mb: largest chunk in MiB, or one for each library: chunks go up and
            down while others arrive, and the critical path is the root's sends, one bucket for each
            child. None: whole buckets.

    Raises:
        ValueError: a chunk_mb that is not above 0.
    """

    def __init__(self, chunk_mb: ChunkMB = None) -> None:
        check_chunk_mb(chunk_mb)
        self.chunk_mb = chunk_mb
        self.in_halves = chunk_mb is None  # chunks go down while others still go up
        self._buffers = ScratchBuffer()

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        chunk_mb = chunk_mb_over(self.chunk_mb, comm.backend)
        if chunk_mb is None or comm.size == 1:
            super().average(bucket, comm)
            return
        node = binomial_node(comm.rank, comm.size)
        divide = partial(bucket.divide, size=comm.size)
        chunks = bucket.flat.tensor_split(pipeline.num_chunks(bucket.flat, chunk_mb))
        pipeline.run(comm, up_and_down(chunks, node, comm.size, divide, self._buffers))

    def add_cost(self, costs: Costs) -> bool:
        chunk_bytes = costs.chunk_bytes(self.chunk_mb)
        costs.wire(costs.network.tree_pipelined(costs.num_bytes, chunk_bytes))
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        children = binomial_node(sizes.rank, sizes.N).children
        if chunk_mb_over(self.chunk_mb, sizes.backend) is None:
            return Needs(scratch=4 * sizes.largest if children else 0)
        return Needs(kept=sizes.chunks(sizes.largest, self.chunk_mb, len(children)))

    def to_root(self, bucket: GradBucket, comm: Comm) -> None:
        node, flat = binomial_node(comm.rank, comm.size), bucket.flat
        received = torch.empty_like(flat) if node.children else flat
        for child in node.children:
            comm.recv(received, child)
            flat += received
        if node.parent is None:
            bucket.divide(flat, comm.size)
        else:
            comm.send(flat, node.parent)

    def from_root(self, flat: Tensor, comm: Comm) -> None:
        node = binomial_node(comm.rank, comm.size)
        if node.parent is not None:
            comm.recv(flat, node.parent)
        for child in reversed(node.children):
            comm.send(flat, child)


def up_and_down(
    chunks: tuple[Tensor, ...],
    node: Node,
    size: int,
    divide: Callable[[Tensor], None],
    buffers: ScratchBuffer,
) -> Iterator[Tick]:
    """Yield one rank's ticks: sum `chunks` up a tree of `size` ranks, and send the means down.

    In a tree of height h, ranks at depth d send chunk k up at tick k + LAG*(h-d), and down at tick
    k + LAG*(h+d). The tree must be no higher than log2(size). The root calls `divide` on sums.
    """
    parent, children, depth = node
    height = size.bit_length() - 1
    arrived = buffers.take(chunks[0], LAG, len(children), chunks[0].numel())

    def chunks_at(tick: int) -> tuple[Tensor, ...]:
        return chunks[tick : tick + 1] if tick >= 0 else ()

    for time in range(len(chunks) + LAG * (2 * height - 1)):
        sends, receives = [], []
        for chunk in chunks_at(time - LAG * (height - depth)):
            for received in arrived[time % LAG]:
                chunk += received[: chunk.numel()]
            if parent is None:
                divide(chunk)
            else:
                sends.append((chunk, parent))
        for chunk in chunks_at(time - LAG * (height + depth)):
            sends += [(chunk, child) for child in children]
        for chunk in chunks_at(time - LAG * (height - depth - 1)):
            for received, child in zip(arrived[time % LAG], children, strict=True):
                receives.append((received[: chunk.numel()], child))
        if parent is not None:
            receives += [(chunk, parent) for chunk in chunks_at(time - LAG * (height + depth - 1))]
        yield sends, receives
