"""Paths of sums from rank to rank: star, tree, double tree and ring.

Their cost is that of Kim et al. (ISPASS 2017, slide 25) and of Patarasuk and Yuan (2009).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lab.distributed.comm import Comm, Handle, Transfer
from lab.exchange.base import ADDED, Exchange
from lab.exchange.bucket import GradBucket, Plans
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.grouping import (
    LAG,
    MIB,
    ChunkMB,
    Node,
    binomial_node,
    check_chunk_mb,
    chunk_mb_over,
    in_order_node,
)

Tick = tuple[list[Transfer], list[Transfer]]  # one rank's simultaneous sends and receives


def run_pipelined(comm: Comm, *schedules: Iterator[Tick]) -> None:
    """Run this rank's `schedules`, iterators over equally many ticks, at the same time.

    When a schedule is asked for tick t, the transfers of tick t-LAG are done: it may read received
    tensors and overwrite sent ones. Transfers of the ticks in between are still under way.

    Ranks share one clock: a tensor sent at a tick must be received at the same tick. So the batches
    of all ranks match one by one, and ranks cannot wait for each other in a circle, even where a
    rank's batches run one after the other, as under NCCL.
    """
    under_way: deque[Handle] = deque()
    for ticks in zip(*schedules, strict=True):
        sends = [transfer for leaving, _ in ticks for transfer in leaving]
        receives = [transfer for _, arriving in ticks for transfer in arriving]
        under_way.append(comm.isend_irecv(sends, receives))
        if len(under_way) == LAG:
            under_way.popleft().wait()
    for handle in under_way:
        handle.wait()


def count_chunks(flat: Tensor, chunk_mb: float | None) -> int:
    """Return how many chunks of at most `chunk_mb` MiB `flat` has; None: one."""
    return 1 if chunk_mb is None else max(1, math.ceil(flat.nbytes / (chunk_mb * MIB)))


class Path(Exchange):
    """An exchange that sums while values go from rank to rank.

    Args:
        chunk_mb: largest chunk in MiB, or one for each library; None: buckets, or what is sent of
            them at once, go whole.
    """

    dtypes = ADDED
    needs_send_recv = True
    accepts_prescaled = True
    steady_from = 0

    def __init__(self, chunk_mb: ChunkMB = 4) -> None:
        check_chunk_mb(chunk_mb)
        self.chunk_mb = chunk_mb
        self._chunks = Plans()  # those that arrive, of buckets of any size


class ReduceBroadcast(Path):
    """An exchange in two halves: reduce to rank 0, then broadcast.

    Attributes:
        in_halves: `to_root` and `from_root` may be called separately.
    """

    in_halves = True

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        self.to_root(bucket, comm)
        self.from_root(bucket.flat, comm)

    @abstractmethod
    def to_root(self, bucket: GradBucket, comm: Comm) -> None:
        """Leave the mean over the ranks in rank 0's `bucket.flat`; undefined on other ranks."""

    @abstractmethod
    def from_root(self, flat: Tensor, comm: Comm) -> None:
        """Replace `flat` by rank 0's on all ranks."""


class Star(ReduceBroadcast):
    """An exchange in which rank 0 receives all gradients, adds in rank order and returns the mean.

    As Torch7's nn.DataParallelTable does (accGradParameters onto the first GPU). Rank 0 moves N-1
    times as many bytes as the others.
    """

    def __init__(self) -> None:
        super().__init__(None)

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


class Tree(ReduceBroadcast):
    """Reduce up a binomial tree, divide at the root, broadcast down the same tree.

    Store and forward of whole buckets: the critical path is 2*ceil(log2 N) transfers of the bucket
    (Kim et al., ISPASS 2017, slide 25; Caffe's P2PSync; Paleo's "Tree"). A rank sends the bucket
    once to its parent and once to each child. Sums are taken in the order of the children.
    Scratch: one bucket, or three chunks for each child.

    With chunks, which go up and down while others arrive, the critical path is the root's sends,
    one bucket for each child.
    """

    def __init__(self, chunk_mb: ChunkMB = None) -> None:
        super().__init__(chunk_mb)
        self.in_halves = chunk_mb is None  # chunks go down while others still go up

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        chunk_mb = chunk_mb_over(self.chunk_mb, comm.backend)
        if chunk_mb is None or comm.size == 1:
            super().average(bucket, comm)
            return
        node = binomial_node(comm.rank, comm.size)
        divide = partial(bucket.divide, size=comm.size)
        chunks = bucket.flat.tensor_split(count_chunks(bucket.flat, chunk_mb))
        run_pipelined(comm, up_and_down(chunks, node, comm.size, divide, self._chunks))

    def add_cost(self, costs: Costs) -> bool:
        chunk_bytes = costs.chunk_bytes(self.chunk_mb)
        costs.wire(costs.network.tree(costs.num_bytes, chunk_bytes))
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
    kept: Plans,
    tree: int = 0,
) -> Iterator[Tick]:
    """Yield one rank's ticks: sum `chunks` up a tree of `size` ranks, and send the means down.

    In a tree of height h, ranks at depth d send chunk k up at tick k + LAG*(h-d), and down at tick
    k + LAG*(h+d). The tree must be no higher than log2(size). The root calls `divide` on sums.
    Memory for chunks that arrive is taken from `kept`, as that of number `tree` among trees that
    run at the same time.
    """
    parent, children, depth = node
    height = size.bit_length() - 1
    arrived = kept.scratch(f"tree {tree}", chunks[0], LAG, len(children), chunks[0].numel())

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


class DoubleTree(Path):
    """Reduce and broadcast on two complementary binary trees (Sanders, Speck and Träff, 2009).

    An inner rank of one tree is a leaf of the other, so for any N a rank sends at most two buckets,
    over log2(N) hops each way (as in NCCL since 2.4). Each tree takes half of the bucket, in chunks
    that go up and down while others arrive. Sums are taken in the order of the children. Scratch:
    three chunks for each of at most two children.
    """

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
        num_chunks = count_chunks(halves[0], chunk_mb_over(self.chunk_mb, comm.backend))
        first, second = (
            up_and_down(
                half.tensor_split(num_chunks),
                in_order_node(comm.rank, comm.size, tree),
                comm.size,
                partial(bucket.divide, size=comm.size),
                self._chunks,
                tree,
            )
            for tree, half in enumerate(halves)
        )
        run_pipelined(comm, first, second)


class Ring(Path):
    """2(N-1) steps that move one N-th of the bucket each (Patarasuk and Yuan, 2009, section 3).

    Part p is summed along the ring starting at rank p+1, so the order of its sum is fixed. A part
    travels in pieces: one is added while the next ones are on their way. Parts may differ in length
    by one value; ranks beyond the number of values own an empty one. Scratch: three pieces, each a
    chunk.
    """

    def add_cost(self, costs: Costs) -> bool:
        costs.wire(costs.network.ring(costs.num_bytes, costs.chunk_bytes(self.chunk_mb)))
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        return Needs(kept=sizes.chunks(sizes.largest / sizes.N, self.chunk_mb))

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if comm.size > 1:
            run_pipelined(comm, self._ticks(bucket, comm))

    def _ticks(self, bucket: GradBucket, comm: Comm) -> Iterator[Tick]:
        rank, size = comm.rank, comm.size
        parts = bucket.flat.tensor_split(size)
        num_pieces = count_chunks(parts[0], chunk_mb_over(self.chunk_mb, comm.backend))
        pieces = [part.tensor_split(num_pieces) for part in parts]
        arrived = self._chunks.scratch("ring", bucket.flat, LAG, pieces[0][0].numel())
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
