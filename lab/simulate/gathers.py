"""Stages of the all-gathers of a unit's weights: torch's own, and in bytes (ZeRO++'s qwZ).

The last stage of each copies weights to the message and from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lab.exchange.cost import Shape
from lab.simulate.load import FSDP, Load, Stage
from lab.simulate.network import Network


def exact(
    shapes: Sequence[Shape], network: Network, inside: bool, second: bool = False
) -> list[Stage]:
    """Gather float32.

    Args:
        shapes: padded, so that all ranks have as much of each.
        inside: only links inside nodes are busy.
        second: from a second shard, of which each rank made a copy after forward (hpZ).
    """
    load = Load(shapes, FSDP, network)
    part = load.num_bytes / load.N
    load.wire(network.all_gather(part), inside)
    _copy(load, also=part if second else 0.0)
    return load.stages


def in_bytes(shapes: Sequence[Shape], network: Network, inside: bool) -> list[Stage]:
    """Gather a byte for each value, and decode the parts of all ranks. Arguments as `exact`."""
    from lab.simulate import recorded  # with torch, which settings and help do not need

    load = Load(shapes, "Int8", network)  # at the rate of that codec
    recorded.add_gather(load)
    load.stages = [replace(s, inside=inside and s.row == "exchange") for s in load.stages]
    _copy(load)
    return load.stages


def _copy(load: Load, also: float = 0.0) -> None:
    """Copy a rank's part to the message, all parts from it, and `also` so many bytes."""
    copies = Load(load.shapes, FSDP, load.network, load.stages)
    copies.codec(2 * (load.num_bytes / load.N + load.num_bytes + also))


GATHERS: dict[str, Callable[[Sequence[Shape], Network, bool], list[Stage]]] = {
    "torch": exact,
    "int8": in_bytes,
}
