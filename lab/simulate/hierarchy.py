"""The cost card of two levels: stages inside the nodes, and another card's between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lab.exchange.rows import part_shape
from lab.model.profile import VALUE_BYTES
from lab.simulate.load import Load, Relay, Settings, Sizes


def add_stages(load: Load, inter: Callable[[Load], None], relay: Relay | None) -> None:
    """Add the stages of a bucket; the largest part stands for all.

    Args:
        inter: appends the stages of the exchange between nodes to a Load.
        relay: of that exchange.
    """
    network, settings = load.network, load.exchange["inter"]
    if network.local == 1 and network.size > 1:
        alone = Load(load.shapes, settings, network)
        inter(alone)
        load.stages += alone.stages
        return
    rails = smallest_node(network.size, network.local)
    parts = [[part_shape(shape, rail, rails) for shape in load.shapes] for rail in range(rails)]
    part = max(parts, key=_values)
    copied = 2 * load.num_bytes * (len(load.shapes) > 1)  # into blocks, and back
    node, block_bytes = network.inside(), VALUE_BYTES * _values(part)
    load.codec(copied, calls=bool(copied))
    load.wire(node.reduce_scatter(block_bytes), inside=True)
    rail = Load(part, settings, network.rail(rails), load.stages)
    if relay and network.num_nodes > 1:
        relay.sum(rail)
        load.wire(node.all_gather(relay.message_bytes(rail)), inside=True)
        for received in parts:
            relay.decode(Load(received, settings, rail.network, load.stages))
    else:
        if network.num_nodes > 1:
            inter(rail)
        load.wire(node.all_gather(block_bytes), inside=True)
    load.codec(copied, calls=bool(copied))


def smallest_node(size: int, local: int) -> int:
    """Return the ranks of the smallest node, where all but the last have `local`."""
    return size - local * (-(-size // local) - 1)


def of_part(sizes: Sizes) -> Sizes:
    """Return the sizes of one rail: those of the exchange between nodes."""
    rails = smallest_node(sizes.N, sizes.local)
    return replace(
        sizes,
        n=sizes.n // rails,
        gathered=sizes.gathered // rails,
        largest=sizes.largest // rails,
        rank=sizes.rank // sizes.local,
        N=-(-sizes.N // sizes.local),
        local=1,
    )


def kept(
    sizes: Sizes,
    inter: Callable[[Sizes, Settings], float],
    settings: Settings,
    relay: Relay | None,
) -> float:
    """Count the bytes that a rank keeps: blocks of gathered buckets, arriving ones, and inter's.

    NCCL needs no memory for what arrives. A message of its own rail is counted by `inter`.
    """
    if sizes.local == 1 and sizes.N > 1:
        return inter(sizes, settings)
    wider = sizes.local / smallest_node(sizes.N, sizes.local)
    arriving = 0 if sizes.backend == "nccl" or sizes.N == 1 else sizes.n
    own = VALUE_BYTES * wider * (sizes.gathered + arriving)
    if sizes.local >= sizes.N:
        return own
    part = of_part(sizes)
    others = relay.kept(part.n) * (sizes.local - 1) if relay else 0
    return own + inter(part, settings) + others


def scratch(sizes: Sizes, inter: Callable[[Sizes, Settings], float], settings: Settings) -> float:
    """Count the bytes of scratch that the exchange between nodes needs."""
    if sizes.local == 1 and sizes.N > 1:
        return inter(sizes, settings)
    return inter(of_part(sizes), settings) if sizes.local < sizes.N else 0


def _values(shapes: list[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
