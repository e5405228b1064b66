"""What collectives cost, in messages and bytes on the critical path.

Every rank is alike, so the critical path of one stands for all, and 4096 ranks cost no more to
reckon than two. Trees and rings are those of lab/exchange; where ranks of a node are next to each
other, a tree's first hops stay within it, and a ring waits for its slowest link.
"""

from __future__ import annotations

import math
from functools import cached_property

from lab.simulate.hardware import Hardware, Link

NOWHERE = Link(0.0, math.inf)  # joins a rank with itself


class Network:
    """`size` ranks on `hardware`. Methods return seconds; sizes are in bytes.

    Raises:
        ValueError: the hardware has fewer ranks.
    """

    def __init__(self, hardware: Hardware, size: int) -> None:
        self.size = size
        self.hardware = hardware
        self.local = min(size, hardware.ranks_per_node)  # ranks on a node
        self.num_nodes = -(-size // hardware.ranks_per_node)
        if self.num_nodes > 1 and hardware.inter is None:
            raise ValueError(
                f"world_size={size}: hardware={hardware.name} has {hardware.ranks_per_node} ranks"
            )
        self.intra = (hardware.intra if self.local > 1 else None) or NOWHERE
        self.inter = (hardware.inter if self.num_nodes > 1 else None) or NOWHERE

    @cached_property
    def slowest(self) -> Link:
        """The link that a ring over all ranks waits for."""
        return self.inter if self.num_nodes > 1 else self.intra

    def tree(self, num_bytes: float) -> float:
        """Store and forward: 2 ceil(log2 N) transfers (Kim et al. 2017, slide 25)."""
        return 2 * sum(hops * link.seconds(num_bytes) for hops, link in self._hops())

    def tree_pipelined(self, num_bytes: float, chunk_bytes: float) -> float:
        """The tree in chunks: the first goes all the way, the others follow at the root's rate.

        The root moves each chunk once for each of its children, both ways at the same time.
        """
        chunks = max(1, math.ceil(num_bytes / chunk_bytes))
        chunk = num_bytes / chunks
        at_root = max(hops * link.seconds(chunk) for hops, link in self._hops())
        return self.tree(chunk) + (chunks - 1) * at_root

    def tree_double(self, num_bytes: float, chunk_bytes: float) -> float:
        """Two trees with half each, in chunks.

        The busiest rank sends (log2 N + 1) / 2 times all bytes, at most twice.
        """
        chunks = max(1, math.ceil(num_bytes / 2 / chunk_bytes))
        chunk = num_bytes / 2 / chunks
        busiest = min(2.0, (log2(self.size) + 1) / 2)
        return self.tree(chunk) + (chunks - 1) * busiest * 2 * self.slowest.seconds(chunk)

    def ring(self, num_bytes: float, chunk_bytes: float = math.inf) -> float:
        """2(N-1) steps of an N-th each (Patarasuk and Yuan 2009), in pieces."""
        part = num_bytes / self.size
        pieces = max(1, math.ceil(part / chunk_bytes))
        return 2 * (self.size - 1) * pieces * self.slowest.seconds(part / pieces)

    def star(self, num_bytes: float) -> float:
        """All to one rank and back, one after the other."""
        within, beyond = self.local - 1, self.size - self.local
        return 2 * (within * self.intra.seconds(num_bytes) + beyond * self.inter.seconds(num_bytes))

    def all_reduce(self, num_bytes: float) -> float:
        """The library's: Gloo's ring; NCCL's ring or tree, whichever is faster, between the nodes,
        after a reduction within each and before a broadcast there.
        """
        if self.hardware.library == "gloo":
            return self.ring(num_bytes)
        if self.num_nodes == 1:
            return _best(self.intra, self.size, num_bytes)
        hops, rate = self.local - 1, self.intra.beta_bytes_per_s * self.intra.num_links
        within = hops * self.intra.alpha_s + num_bytes / rate
        return 2 * within + _best(self.inter, self.num_nodes, num_bytes)

    def all_gather(self, num_bytes: float) -> float:
        """Around a ring; `num_bytes` of each rank."""
        return (self.size - 1) * self.slowest.seconds(num_bytes)

    def all_to_all(self, num_bytes: float) -> float:
        """`num_bytes` from each rank to each other; a node's links are shared by its ranks."""
        within, beyond = self.local - 1, self.size - self.local
        sharing = max(1.0, self.local / self.inter.num_links)
        outside = beyond * self.inter.seconds(sharing * num_bytes)
        return within * self.intra.seconds(num_bytes) + outside

    def _hops(self) -> tuple[tuple[int, Link], ...]:
        """The levels of a binomial tree over the links of each kind."""
        return (log2(self.local), self.intra), (log2(self.num_nodes), self.inter)


def log2(size: int) -> int:
    """The logarithm to base 2, rounded up."""
    return (size - 1).bit_length()


def _best(link: Link, size: int, num_bytes: float) -> float:
    """NCCL's choice: a ring, or two binary trees that move all bytes twice in log2 N hops."""
    rate = link.beta_bytes_per_s * link.num_links
    ring = 2 * (size - 1) * (link.alpha_s + num_bytes / size / rate)
    tree = 2 * (log2(size) * link.alpha_s + num_bytes / rate)
    return min(ring, tree) if size > 1 else 0.0
