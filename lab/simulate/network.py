"""Costs of collectives, in messages and bytes on the critical path.

The critical path of one rank stands for all, so 4096 ranks take no longer to compute than two.
Trees and rings are those of lab/exchange; ranks of a node have adjacent numbers, so a tree's first
hops stay within the node. A ring is as slow as its slowest link. Trees are followed hop by hop
where nodes have links of different rates, or so many ranks that early hops cross nodes; stars, too,
with such links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

from lab.exchange.grouping import binomial_node
from lab.simulate import nccl
from lab.simulate.hardware import PROTOCOLS, Hardware, Link

NOWHERE = Link(0.0, math.inf)  # joins a rank with itself
CLOSE = 1e-9  # relative; the bisection ends there
STANDARD = NormalDist()


@dataclass(frozen=True)
class CollectiveCost:
    """A collective's time, and its bytes as Comm counts them.

    Attributes:
        payload_bytes: those of the busiest rank.
        across_bytes: those that the ranks of a node, of the busiest, together send to other nodes;
            NaN: not known, as of trees and stars.
    """

    seconds: float = 0.0
    payload_bytes: float = 0.0
    across_bytes: float = 0.0

    def __add__(self, other: CollectiveCost) -> CollectiveCost:
        return CollectiveCost(
            self.seconds + other.seconds,
            self.payload_bytes + other.payload_bytes,
            self.across_bytes + other.across_bytes,
        )


class Network:
    """`size` ranks on `hardware`, and the costs of their collectives.

    Raises:
        ValueError: the hardware has fewer ranks, or too few node_rates.
    """

    def __init__(self, hardware: Hardware, size: int) -> None:
        self.size = size
        self.hardware = hardware
        self.local = min(size, hardware.ranks_per_node)  # ranks on a node
        slow = min(hardware.num_slow, size - 1)
        # The slowest rank's time to compute, in those of a usual rank.
        self.slowest_factor = slowest_factor(size, hardware.jitter, slow, hardware.slow_factor)
        self.num_nodes = -(-size // hardware.ranks_per_node)
        self.groups = 1  # that do the same at the same time, with ranks on the same nodes
        if self.num_nodes > 1 and hardware.inter is None:
            raise ValueError(
                f"world_size={size}: hardware={hardware.name} has a single "
                f"node, with ranks_per_node={hardware.ranks_per_node}"
            )
        self.intra = (hardware.intra if self.local > 1 else None) or NOWHERE
        self.rates = hardware.node_rates[: self.num_nodes]
        if self.rates and len(self.rates) < self.num_nodes:
            raise ValueError(
                f"world_size={size}: hardware={hardware.name} has "
                f"node_rates for only {len(self.rates)} nodes"
            )
        # A tree halves ranks, and so it halves nodes too only if each has a power of two of them.
        crosses_early = self.num_nodes > 1 and self.local.bit_count() > 1
        self._has_like_hops = not self.rates and not crosses_early
        self.inter = NOWHERE
        if self.num_nodes > 1 and hardware.inter:
            slower = 1 + hardware.incast * math.log2(self.num_nodes)
            rate = min(self.rates, default=hardware.inter.bandwidth_bytes_per_s)
            self.inter = replace(hardware.inter, bandwidth_bytes_per_s=rate / slower)
        if hardware.num_cores:  # whoever handles messages waits for a core
            waiting = hardware.message_cpu * max(0.0, size / hardware.num_cores - 1)
            self.inter = replace(self.inter, latency_s=(1 + waiting) * self.inter.latency_s)
        self.slowest = self.inter if self.num_nodes > 1 else self.intra

    def _longest_hop_s(self, num_bytes: float) -> float:
        """Return the seconds of a message each way on the slower kind of links, as bounds a ring.

        Between nodes, one adapter may be faster than a single link within them.
        """
        return max(link.seconds_both_ways(num_bytes) for link in (self.intra, self.inter))

    def tree(self, num_bytes: float, chunk_bytes: float = math.inf) -> CollectiveCost:
        """Return the cost of store and forward: 2 ceil(log2 N) transfers (Kim et al., slide 25).

        Chunks, if there are some, follow each other at the root's rate. The root moves each chunk
        once per child, in both directions at the same time. On the way down a rank sends to all its
        children at once, so that they share its link; without chunks, to one after the other, but
        the end of a message shares it with the next one while the host still holds that end.
        """
        chunks = max(1, math.ceil(num_bytes / chunk_bytes))
        chunk = num_bytes / chunks
        up_s = self._by_hops(chunk, self._adding(chunk))
        down_s = self._one_by_one(chunk) if math.isinf(chunk_bytes) else self._way_down(chunk)
        seconds = up_s + down_s + (chunks - 1) * self._at_root(chunk)
        return CollectiveCost(seconds, log2(self.size) * num_bytes, self._across(math.nan))

    def tree_double(self, num_bytes: float, chunk_bytes: float) -> CollectiveCost:
        """Return the cost of two trees that carry half of the bytes each, in chunks.

        The busiest rank sends (log2 N + 1) / 2 times all bytes, at most twice.
        """
        if self.size == 1:
            return CollectiveCost()
        chunks = max(1, math.ceil(num_bytes / 2 / chunk_bytes))
        chunk = num_bytes / 2 / chunks
        busiest = min(2.0, (log2(self.size) + 1) / 2)
        following = (chunks - 1) * 2 * busiest * self._longest_hop_s(chunk)
        up_s = self._by_hops(chunk, self._adding(chunk))
        seconds = up_s + self._way_down(chunk) + following
        return CollectiveCost(seconds, busiest * num_bytes, self._across(math.nan))

    def ring(self, num_bytes: float, chunk_bytes: float = math.inf) -> CollectiveCost:
        """Return the cost of 2(N-1) steps of an N-th each (Patarasuk and Yuan 2009), in pieces."""
        part, steps = num_bytes / self.size, 2 * (self.size - 1)
        pieces = max(1, math.ceil(part / chunk_bytes))
        wire_s = steps * pieces * self._longest_hop_s(part / pieces)
        added_s = self._adding(steps / 2 * part)
        return CollectiveCost(wire_s + added_s, steps * part, self._across(steps * part))

    def star(self, num_bytes: float) -> CollectiveCost:
        """Return the cost of sending all to one rank and back, one rank after the other.

        Where a node's CPUs hold the weights, its ranks share the links to them instead.
        """
        if (server := self.hardware.server) and 1 < self.size == self.local:
            sharing = max(1.0, self.local / server.links_of(self.local))
            seconds = 2 * server.seconds(sharing * num_bytes)
            return CollectiveCost(seconds, num_bytes, self._across(math.nan))
        if self.rates:
            links = [(1, self.link(0, rank)) for rank in range(1, self.size)]
        else:
            links = [(self.local - 1, self.intra), (self.size - self.local, self.inter)]
        each_way = sum(count * link.seconds(num_bytes) for count, link in links)
        added_s = (self.size - 1) * self._adding(num_bytes)
        sent = (self.size - 1) * num_bytes
        return CollectiveCost(2 * each_way + added_s, sent, self._across(math.nan))

    def all_reduce(self, num_bytes: float) -> CollectiveCost:
        """Return the cost of the library's all-reduce; no bytes cost nothing.

        Gloo uses a ring; NCCL the fastest of its algorithms and protocols.
        """
        if not num_bytes:
            return CollectiveCost()
        ring = self.ring(num_bytes)
        if self.hardware.library == "nccl":
            ring = replace(ring, seconds=self._nccl_s(num_bytes, reduces=True))
        return self._as_measured("all_reduce", num_bytes, ring)

    def intra_node(self) -> Network:
        """Return the ranks of one node."""
        return self.neighbours(self.local)

    def neighbours(self, size: int) -> Network:
        """Return `size` ranks of adjacent numbers, while all others do the same."""
        return self._part(size, self.hardware)

    def rail(self, rails: int) -> Network:
        """Return one rank of each node, while those of `rails` rails share the nodes' links."""
        return self._sharing(self.num_nodes, 1, rails)

    def inter_node(self, stride: int) -> Network:
        """Return one of every `stride` ranks, which divide all, while all others do the same."""
        rails = min(stride, self.local)
        return self._sharing(self.size // stride, self.local // rails, rails)

    def _sharing(self, size: int, local: int, groups: int) -> Network:
        """Return `size` ranks, `local` on a node, of whose links `groups` have equal shares."""
        inter, rates = self.hardware.inter, self.rates
        if inter:
            width = inter.links_of(self.num_nodes) / groups
            bandwidth = width * inter.bandwidth_bytes_per_s
            inter = replace(inter, bandwidth_bytes_per_s=bandwidth, num_links=1)
            if size < local * self.num_nodes:  # some nodes have none of them: the slowest counts
                rates = sorted(rates)[:1] * size
            rates = tuple(width * rate for rate in rates)
        hardware = replace(
            self.hardware,
            ranks_per_node=local,
            intra=self.hardware.intra if local > 1 else None,
            inter=inter,
            node_rates=rates,
            measured=(),  # of whole nodes
        )
        part = self._part(size, hardware)
        part.groups = self.groups * groups
        return part

    def _part(self, size: int, hardware: Hardware) -> Network:
        """Return `size` of these ranks, all of which are as busy as all ranks are."""
        cores = hardware.num_cores and hardware.num_cores * size / self.size
        part = Network(replace(hardware, num_cores=cores), size)
        part.slowest_factor = self.slowest_factor
        return part

    def reduce_scatter(self, num_bytes: float) -> CollectiveCost:
        """Return the cost of a sum of `num_bytes` at each rank: over Gloo an all-to-all first."""
        if self.hardware.library == "nccl":
            gathered = self._gathered(num_bytes)
            return self._as_measured("reduce_scatter", self.size * num_bytes, gathered)
        return self.all_to_all(num_bytes) + CollectiveCost(
            self._adding((self.size - 1) * num_bytes)
        )

    def all_gather(self, num_bytes: float) -> CollectiveCost:
        """Return the cost of a ring that carries `num_bytes` of each rank."""
        return self._as_measured("all_gather", self.size * num_bytes, self._gathered(num_bytes))

    def _gathered(self, num_bytes: float) -> CollectiveCost:
        steps = self.size - 1
        if self.hardware.library == "nccl":
            seconds = self._nccl_s(num_bytes, reduces=False)
        else:
            seconds = steps * self._longest_hop_s(num_bytes)
        return CollectiveCost(seconds, steps * num_bytes, self._across(steps * num_bytes))

    def all_to_all(self, num_bytes: float) -> CollectiveCost:
        """Return the cost of `num_bytes` between every two ranks; ranks share a node's links."""
        within, beyond = self.local - 1, self.size - self.local
        sharing = max(1.0, self.local / self.inter.links_of(self.num_nodes))
        outside = beyond * self.inter.seconds_both_ways(sharing * num_bytes)
        seconds = within * self.intra.seconds_both_ways(num_bytes) + outside
        across_bytes = self._across(self.local * beyond * num_bytes)
        return CollectiveCost(seconds, (self.size - 1) * num_bytes, across_bytes)

    def _as_measured(
        self, operation: str, num_bytes: float, cost: CollectiveCost
    ) -> CollectiveCost:
        """Return the cost as many times longer as a log's collective takes than it is modelled.

        Of as many ranks and bytes as the log has, it takes as long as there. Beyond its sizes the
        ratio is that of the nearest.

        Args:
            num_bytes: as the log counts them.
        """
        hardware = self.hardware
        for curve in hardware.measured if num_bytes and self.size > 1 else ():
            spans = curve.ranks > hardware.ranks_per_node
            if curve.operation == operation and spans == (self.num_nodes > 1):
                size = curve.within(num_bytes)
                other = Network(replace(hardware, measured=()), curve.ranks)
                longer = curve.seconds(size) / other.collective_s(operation, size)
                return replace(cost, seconds=longer * cost.seconds)
        return cost

    def collective_s(self, operation: str, num_bytes: float) -> float:
        """Return the seconds of one of the library's collectives, of bytes as logs count them."""
        if operation == "all_reduce":
            return self.all_reduce(num_bytes).seconds
        collective = {"all_gather": self.all_gather, "reduce_scatter": self.reduce_scatter}
        return collective[operation](num_bytes / self.size).seconds

    def _across(self, num_bytes: float) -> float:
        """Return what leaves a node, if one group sends `num_bytes`: in a ring, one rank of it."""
        return self.groups * num_bytes if self.num_nodes > 1 else 0.0

    def _nccl_s(self, num_bytes: float, reduces: bool) -> float:
        """Return the seconds of the fastest algorithm and protocol that NCCL may choose.

        Args:
            num_bytes: those of an all-reduce if it `reduces`, by a ring or by a chain within each
                node and a binary tree of nodes; or of one rank's part of an all-gather, by a ring.
        """
        size, nodes = self.size, self.num_nodes
        if size == 1:
            return 0.0
        rates = self.intra.rate_of(self.local), self.inter.rate_of(nodes)
        if self.hardware.nccl:
            ranks = nccl.NvlinkRanks(self.hardware.nccl, self.local, nodes, *rates)
            if reduces:
                return nccl.all_reduce(ranks, num_bytes).seconds
            # A last node that is not full counts as full, with as many bytes in all.
            return nccl.all_gather(ranks, num_bytes * size / (self.local * nodes)).seconds
        rate = min(rates)  # of a ring's slowest stretch; each adapter of a node carries one
        left = min(size - 1, nodes) if nodes > 1 else 0  # hops of a ring, which leaves a node once
        ring_s = (size - 1 - left) * self.intra.latency_s + left * self.inter.latency_s
        tree_s = 2 * ((self.local - 1) * self.intra.latency_s + log2(nodes) * self.inter.latency_s)
        times = []
        for protocol in map(PROTOCOLS.__getitem__, self.hardware.protocols):
            launch_s, hop = protocol.launch_s, protocol.hop
            if reduces:
                both_s = 2 * (size - 1) / size * (num_bytes / rate) / protocol.ring_share
                times.append(launch_s + hop * 2 * ring_s + both_s)
                times.append(launch_s + hop * tree_s + 2 * (num_bytes / rate) / protocol.tree_share)
            else:
                wire_s = (size - 1) * num_bytes / rate
                times.append(launch_s + hop * ring_s + wire_s / protocol.ring_share)
        return min(times)

    def _by_hops(self, num_bytes: float, added_s: float = 0.0) -> float:
        """Return the seconds between a binomial tree's leaves and root; a rank adds `added_s`."""
        if not self._has_like_hops:
            return self._completed(0, num_bytes, added_s)
        return sum(hops * (link.seconds(num_bytes) + added_s) for hops, link in self._hops())

    def _adding(self, num_bytes: float) -> float:
        """Return the seconds in which a rank adds what has arrived, while its links wait."""
        return num_bytes / (self.hardware.reduce_bytes_per_s or math.inf)

    def _one_by_one(self, num_bytes: float) -> float:
        """Return the seconds from the root to the leaves, where a rank serves a child at a time.

        Child i has all of a message after i transfers, and after the end of the next one if it is
        not the last child. The longest way, through children that are not, has one level less than
        the largest full tree among these nodes.
        """
        shared = min(num_bytes, self.hardware.send_buffer_bytes)
        levels = max(0, self.num_nodes.bit_length() - 2)
        return self._by_hops(num_bytes) + levels * shared / self.inter.bandwidth_bytes_per_s

    def _way_down(self, num_bytes: float) -> float:
        """Return the seconds from the root to the leaves, where children share their parent's link.

        At distance d from the root, a node of a binomial tree has log2 N - d children.
        """
        if not self._has_like_hops:
            return self._reached(0, num_bytes)
        total_s = 0.0
        for hops, link in self._hops():
            together = hops * (hops + 1) / 2
            total_s += hops * link.latency_s + together * num_bytes / link.bandwidth_bytes_per_s
        return total_s

    def _reached(self, rank: int, num_bytes: float) -> float:
        """Return when the last rank below `rank` has received what that rank sends down."""
        children = binomial_node(rank, self.size).children
        sent_s = sum(self.link(rank, child).seconds(num_bytes) for child in children)
        below = (self._reached(child, num_bytes) for child in children)
        return sent_s + max(below, default=0.0)

    def _completed(self, rank: int, num_bytes: float, added_s: float) -> float:
        """Return when a rank has received from all its children, one after the other."""
        now_s = 0.0
        for child in binomial_node(rank, self.size).children:
            ready_s = self._completed(child, num_bytes, added_s)
            now_s = max(now_s, ready_s) + self.link(rank, child).seconds(num_bytes) + added_s
        return now_s

    def _at_root(self, num_bytes: float) -> float:
        """Return the seconds between two chunks: the root's links within, or those beyond."""
        if not self._has_like_hops:
            children = binomial_node(0, self.size).children
            return sum(self.link(0, child).seconds_both_ways(num_bytes) for child in children)
        return max(hops * link.seconds_both_ways(num_bytes) for hops, link in self._hops())

    def _hops(self) -> tuple[tuple[int, Link], ...]:
        """Return the number of levels of a binomial tree on each kind of link."""
        return (log2(self.local), self.intra), (log2(self.num_nodes), self.inter)

    def link(self, rank: int, other: int) -> Link:
        """Return the link between two ranks, whose nodes may have links of their own rates."""
        nodes = [each // self.hardware.ranks_per_node for each in (rank, other)]
        if nodes[0] == nodes[1]:
            return self.intra
        if not self.rates:
            return self.inter
        return replace(self.inter, bandwidth_bytes_per_s=min(self.rates[node] for node in nodes))


def log2(size: int) -> int:
    """Return the base-2 logarithm, rounded up."""
    return (size - 1).bit_length()


@cache
def slowest_factor(size: int, jitter: float, num_slow: int = 0, slow_factor: float = 1.0) -> float:
    """Return the compute time of the slowest of `size` ranks, in those of a usual rank.

    In each step, each rank's time is drawn from a normal distribution of its own mean; the result
    is the median over steps of the largest.

    Args:
        jitter: standard deviation of a rank's time, relative to its mean.
        num_slow: how many of the ranks take `slow_factor` times as long on average.
    """
    groups = [(size - num_slow, 1.0), (num_slow, slow_factor)]
    means = [mean for number, mean in groups if number]
    if jitter == 0 or size == 1:
        return max(means)
    low, high = max(means), max(means) * (1 + 10 * jitter)
    while high - low > CLOSE * low:
        middle = (low + high) / 2
        below = 1.0  # probability that all ranks are faster than `middle`
        for number, mean in groups:
            below *= STANDARD.cdf((middle / mean - 1) / jitter) ** number
        low, high = (middle, high) if below < 0.5 else (low, middle)
    return high
