"""Costs of collectives, in messages and bytes on the critical path.

All ranks are alike, so the critical path of one stands for all, and 4096 ranks take no longer to
compute than two. Trees and rings are those of lab/exchange; ranks of a node have adjacent numbers,
so a tree's first hops stay within the node. A ring is as slow as its slowest link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lab.simulate.hardware import Hardware, Link

NOWHERE = Link(0.0, math.inf)  # joins a rank with itself


@dataclass(frozen=True)
class Cost:
    """A collective's time, and the bytes of its busiest rank as Comm counts them."""

    seconds: float = 0.0
    payload_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.payload_bytes + other.payload_bytes)


class Network:
    """`size` ranks on `hardware`, and the costs of their collectives.

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
        self.slowest = self.inter if self.num_nodes > 1 else self.intra  # bounds a ring

    def tree(self, num_bytes: float) -> Cost:
        """Return the cost of store and forward: 2 ceil(log2 N) transfers (Kim et al., slide 25)."""
        return self.tree_pipelined(num_bytes, math.inf)

    def tree_pipelined(self, num_bytes: float, chunk_bytes: float) -> Cost:
        """Return the cost of the tree in chunks, which follow each other at the root's rate.

        The root moves each chunk once per child, in both directions at the same time.
        """
        chunks = max(1, math.ceil(num_bytes / chunk_bytes))
        chunk = num_bytes / chunks
        at_root = max(hops * link.seconds(chunk) for hops, link in self._hops())
        seconds = self._up_and_down(chunk) + (chunks - 1) * at_root
        return Cost(seconds, log2(self.size) * num_bytes)

    def tree_double(self, num_bytes: float, chunk_bytes: float) -> Cost:
        """Return the cost of two trees that carry half of the bytes each, in chunks.


        The busiest rank sends (log2 N + 1) / 2 times all bytes, at most twice.
        """
        if self.size == 1:
            return Cost()
        chunks = max(1, math.ceil(num_bytes / 2 / chunk_bytes))
        chunk = num_bytes / 2 / chunks
        busiest = min(2.0, (log2(self.size) + 1) / 2)
        following = (chunks - 1) * 2 * busiest * self.slowest.seconds(chunk)
        return Cost(self._up_and_down(chunk) + following, busiest * num_bytes)

    def ring(self, num_bytes: float, chunk_bytes: float = math.inf) -> Cost:
        """Return the cost of 2(N-1) steps of an N-th each (Patarasuk and Yuan 2009), in pieces."""
        part, steps = num_bytes / self.size, 2 * (self.size - 1)
        pieces = max(1, math.ceil(part / chunk_bytes))
        return Cost(steps * pieces * self.slowest.seconds(part / pieces), steps * part)

    def star(self, num_bytes: float) -> Cost:
        """Return the cost of sending all to one rank and back, one rank after the other."""
        within, beyond = self.local - 1, self.size - self.local
        each_way = within * self.intra.seconds(num_bytes) + beyond * self.inter.seconds(num_bytes)
        return Cost(2 * each_way, (self.size - 1) * num_bytes)

    def all_reduce(self, num_bytes: float) -> Cost:
        """Return the cost of the library's all-reduce; no bytes cost nothing.

        Gloo uses a ring. NCCL reduces within nodes, exchanges between them by a ring or a tree,
        whichever is faster, and broadcasts within nodes.
        """
        if not num_bytes:
            return Cost()
        ring = self.ring(num_bytes)
        if self.hardware.library == "gloo":
            rate = self.hardware.reduce_bytes_per_s or math.inf
            added = num_bytes * (self.size - 1) / self.size  # by each rank in turn
            return replace(ring, seconds=ring.seconds + added / rate)
        if self.num_nodes == 1:
            return Cost(_best_s(self.intra, self.size, num_bytes), ring.payload_bytes)
        within_s = (self.local - 1) * self.intra.latency_s + num_bytes / _rate(self.intra)
        seconds = 2 * within_s + _best_s(self.inter, self.num_nodes, num_bytes)
        return Cost(seconds, ring.payload_bytes)

    def all_gather(self, num_bytes: float) -> Cost:
        """Return the cost of a ring that carries `num_bytes` of each rank."""
        steps = self.size - 1
        return Cost(steps * self.slowest.seconds(num_bytes), steps * num_bytes)

    def all_to_all(self, num_bytes: float) -> Cost:
        """Return the cost of `num_bytes` between every two ranks; ranks share a node's links."""
        within, beyond = self.local - 1, self.size - self.local
        sharing = max(1.0, self.local / self.inter.num_links)
        outside = beyond * self.inter.seconds(sharing * num_bytes)
        seconds = within * self.intra.seconds(num_bytes) + outside
        return Cost(seconds, (self.size - 1) * num_bytes)

    def _up_and_down(self, num_bytes: float) -> float:
        return 2 * sum(hops * link.seconds(num_bytes) for hops, link in self._hops())

    def _hops(self) -> tuple[tuple[int, Link], ...]:
        """Yield the number of levels of a binomial tree on each kind of link."""
        return (log2(self.local), self.intra), (log2(self.num_nodes), self.inter)


def log2(size: int) -> int:
    """Return the base-2 logarithm, rounded up."""
    return (size - 1).bit_length()


def _best_s(link: Link, size: int, num_bytes: float) -> float:
    """Return the faster of NCCL's ring and its two binary trees, of log2 N hops each."""
    ring = 2 * (size - 1) * (link.latency_s + num_bytes / size / _rate(link))
    tree = 2 * (log2(size) * link.latency_s + num_bytes / _rate(link))
    return min(ring, tree) if size > 1 else 0.0


def _rate(link: Link) -> float:
    return link.bandwidth_bytes_per_s * link.num_links
