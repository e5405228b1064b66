"""NCCL's all-reduce: the fastest of its rings and trees, under the protocols that a machine allows.

The form and the defaults are those of NCCL's own tuning model (NVIDIA/nccl, src/graph/tuning.cc,
2.19): a collective takes a launch, a latency for each hop, and its bytes at the rate of the slowest
link that the ring or tree passes, because pieces follow each other through all links at the same
time. A link's `latency_s` is a hop of a ring under the protocol Simple.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.simulate.hardware import Link


@dataclass(frozen=True)
class Protocol:
    """A way in which NCCL's kernels hand data on.

    Attributes:
        launch_s: seconds before the first hop.
        hop: a hop's latency, as a share of that under Simple.
        ring_share, tree_share: what remains of the links' rate.
    """

    launch_s: float
    hop: float
    ring_share: float
    tree_share: float


PROTOCOLS = {
    "LL": Protocol(6.6e-6, 0.2, 1 / 4, 0.92 / 3.8),
    "LL128": Protocol(14.0e-6, 0.5, 0.92, 0.92 * 120 / 128),
    "Simple": Protocol(8.4e-6, 1.0, 1.0, 0.92),
}


@dataclass(frozen=True)
class Span:
    """Ranks that a collective joins: `local` ranks on each of `num_nodes` nodes."""

    local: int
    num_nodes: int
    intra: Link
    inter: Link

    @property
    def bus_bytes_per_s(self) -> float:
        """The rate of the slowest stretch; each node's adapters carry a ring each."""
        within = self.intra.rate_of(self.local)
        return min(within, self.inter.rate_of(self.num_nodes)) if self.num_nodes > 1 else within

    @property
    def size(self) -> int:
        return self.local * self.num_nodes

    def ring_latency_s(self) -> float:
        """Return the latency of one way round the ring, of which each node is left once."""
        hops = self.size - 1
        outside = min(hops, self.num_nodes) if self.num_nodes > 1 else 0
        return (hops - outside) * self.intra.latency_s + outside * self.inter.latency_s

    def tree_latency_s(self) -> float:
        """Return the latency of a chain within a node and a binary tree of nodes, up and down."""
        levels = (self.num_nodes - 1).bit_length()
        return 2 * ((self.local - 1) * self.intra.latency_s + levels * self.inter.latency_s)


def all_reduce_s(span: Span, num_bytes: float, protocols: tuple[str, ...]) -> float:
    """Return the seconds of an all-reduce of `num_bytes`; one rank takes none."""
    if span.size == 1:
        return 0.0
    wire_s = num_bytes / span.bus_bytes_per_s
    times = []
    for protocol in map(PROTOCOLS.__getitem__, protocols):
        ring_s = 2 * (span.size - 1) / span.size * wire_s / protocol.ring_share
        tree_s = 2 * wire_s / protocol.tree_share
        times += [
            protocol.launch_s + protocol.hop * 2 * span.ring_latency_s() + ring_s,
            protocol.launch_s + protocol.hop * span.tree_latency_s() + tree_s,
        ]
    return min(times)


def all_gather_s(span: Span, num_bytes: float, protocols: tuple[str, ...]) -> float:
    """Return the seconds of a ring that carries `num_bytes` of each rank; one rank takes none."""
    if span.size == 1:
        return 0.0
    wire_s = (span.size - 1) * num_bytes / span.bus_bytes_per_s
    return min(
        protocol.launch_s + protocol.hop * span.ring_latency_s() + wire_s / protocol.ring_share
        for protocol in map(PROTOCOLS.__getitem__, protocols)
    )
