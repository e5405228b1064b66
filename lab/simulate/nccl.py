"""NCCL's choice of an algorithm and a protocol, and how long an all-reduce then takes.

Latencies, shares of the links' rate and the corrections of trees are those by which NCCL itself
chooses (NVIDIA/nccl, src/graph/tuning.cc, 2.20 to 2.28). NCCL only ranks by its estimate, which is
up to half of what collectives of some MiB take: a pipeline is filled and emptied, in pieces whose
size grows with the message. With pieces of the best size, a path of latency L and a wire that is
busy for W take L + W + 2 sqrt(L W) (Hockney and Jesshope 1988, on pipelines); RAMP is the share of
L in that last term, the one value here that is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

MICRO = 1e-6
GIGA = 1e9
# By least squares of logarithms, of all-reduces on eight H100 of 1, 4, 16, ... MiB: those claims of
# conf/claims/nccl_tests.yaml that are inputs. All other sizes and machines there are held out.
RAMP = 0.215
LL, LL128, SIMPLE = PROTOCOLS = ("LL", "LL128", "Simple")
# Microseconds before the first hop, and of a hop over NVLink and between nodes, by protocol.
BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
NVLINK = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
NET = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
NET_OVERHEAD = (1.0, 1.0, 3.0)  # at least so much a hop of a ring that leaves nodes
PLATEAU = {"volta": 1.9, "ampere": 1.4, "hopper": 1.4}  # of such a ring's latency under Simple
NVLS, NVLS_TREE = 25.0, 20.9  # in the switch, and a level of the tree of nodes
EFFICIENCY = {"hopper": 0.85}  # of the links while a switch adds what passes; others have no such
LL_MOST = {"volta": (39.0, 39.0, 20.4), "ampere": (87.7, 39.0, 20.4), "hopper": (141.0, 39.0, 20.4)}
GENERATIONS = tuple(LL_MOST)
TREE, TREE_LL, FLAGS = 0.92, 1 / 3.8, 120 / 128  # FLAGS: of LL128, 8 bytes in 128
# What is left of a tree's rate, by protocol, from 64 B on for each power of two.
TREE_SHARES = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9),
    (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
    ),
)
LAST_SHARES = (1.0, 1.0, 0.9)  # of larger messages


@dataclass(frozen=True)
class NvlinkRanks:
    """Ranks on NVLink, and what joins them.

    Attributes:
        generation: of the GPUs, one of GENERATIONS.
        local, nodes: ranks of a node, and nodes.
        intra, inter: bytes per second of all links of a GPU, and of all adapters of a node.
    """

    generation: str
    local: int
    nodes: int
    intra: float
    inter: float

    @property
    def size(self) -> int:
        """Number of ranks; a last node that is not full counts as full."""
        return self.local * self.nodes


@dataclass(frozen=True)
class Way:
    """An algorithm under a protocol, in seconds.

    Attributes:
        base_s: before the first hop. path_s: of all hops. wire_s: in which the links are busy.
    """

    algorithm: str
    protocol: str
    base_s: float
    path_s: float
    wire_s: float

    @property
    def ranked_s(self) -> float:
        """The seconds by which NCCL ranks it."""
        return self.base_s + self.path_s + self.wire_s

    @property
    def seconds(self) -> float:
        """The seconds that it takes, with the pipeline's filling and emptying."""
        return self.ranked_s + 2 * math.sqrt(RAMP * self.path_s * self.wire_s)


def all_reduce(ranks: NvlinkRanks, num_bytes: float) -> Way:
    """Return the way that NCCL takes to add up `num_bytes` of each rank."""
    return min(_ways(ranks, num_bytes), key=lambda way: way.ranked_s)


def all_gather(ranks: NvlinkRanks, num_bytes: float) -> Way:
    """Return the way that NCCL takes to gather `num_bytes` of each rank: a ring."""
    return min(_rings(ranks, num_bytes * ranks.size, passes=1), key=lambda way: way.ranked_s)


def _ways(ranks: NvlinkRanks, num_bytes: float) -> Iterator[Way]:
    yield from _rings(ranks, num_bytes, passes=2)
    yield from _trees(ranks, num_bytes)
    if ranks.generation in EFFICIENCY and ranks.local > 1:
        yield _in_switch(ranks, num_bytes)


def _rings(ranks: NvlinkRanks, num_bytes: float, passes: int) -> Iterator[Way]:
    """List a ring under each protocol, which carries (N-1)/N of all bytes in each pass."""
    rate = ranks.intra if ranks.nodes == 1 else min(ranks.intra, ranks.inter)
    outside = passes * ranks.nodes if ranks.nodes > 1 else 0
    inside = passes * (ranks.size - 1) - outside
    for number, protocol in enumerate(PROTOCOLS):
        hop = NVLINK["ring"][number]
        if outside:
            hop = max(hop, NET_OVERHEAD[number])
        path = inside * hop + outside * NET["ring"][number]
        if outside and protocol == SIMPLE:
            path *= PLATEAU[ranks.generation]
        carried = {LL: min(_ll_most(ranks), rate / 2), LL128: 0.92 * rate, SIMPLE: rate}[protocol]
        wire_s = passes * (ranks.size - 1) / ranks.size * num_bytes / carried
        yield Way("ring", protocol, BASE["ring"][number] * MICRO, path * MICRO, wire_s)


def _trees(ranks: NvlinkRanks, num_bytes: float) -> Iterator[Way]:
    """List a double binary tree of nodes, and a chain within each, under each protocol.

    Of two nodes each sends half of what it would send among more.
    """
    inter = ranks.inter * (2 if ranks.nodes == 2 else 1)
    rate = TREE * (ranks.intra if ranks.nodes == 1 else min(ranks.intra, inter))
    levels = math.ceil(math.log2(ranks.nodes))
    place = max(0, int(math.log2(max(1.0, num_bytes / 64))))
    for number, protocol in enumerate(PROTOCOLS):
        hops = (ranks.local - 1) * NVLINK["tree"][number] + levels * NET["tree"][number]
        flags = 7 / 9 if ranks.nodes == 1 else FLAGS
        share = {LL: TREE_LL, LL128: flags, SIMPLE: 1.0}[protocol]
        carried = min(_ll_most(ranks), rate * share) if protocol == LL else rate * share
        table = TREE_SHARES[number]
        carried *= table[place] if place < len(table) else LAST_SHARES[number]
        wire_s = 2 * num_bytes / carried
        yield Way("tree", protocol, BASE["tree"][number] * MICRO, 2 * hops * MICRO, wire_s)


def _in_switch(ranks: NvlinkRanks, num_bytes: float) -> Way:
    """Return the way through switches that add (NVLS), and between nodes a tree of them.

    A GPU sends all its bytes once and its share of the sum, so 1 + 1/L of them each way. (NCCL's
    own estimate counts only half of that on 8 GPUs; its rank among the others stays the same.)
    """
    carried_s = (1 + 1 / ranks.local) * num_bytes / (EFFICIENCY[ranks.generation] * ranks.intra)
    if ranks.nodes == 1:
        return Way("NVLS", SIMPLE, 0.0, NVLS * MICRO, carried_s)
    levels = math.ceil(math.log2(ranks.nodes))
    between_s = (1 if ranks.nodes == 2 else 2) * num_bytes / ranks.inter
    path_s = (NVLS + 2 * levels * NVLS_TREE) * MICRO
    return Way("NVLS tree", SIMPLE, 0.0, path_s, max(carried_s, between_s))


def _ll_most(ranks: NvlinkRanks) -> float:
    return LL_MOST[ranks.generation][min(ranks.nodes, 3) - 1] * GIGA
