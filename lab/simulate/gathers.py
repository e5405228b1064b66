"""Stages of the all-gathers of a unit's weights: torch's own, and in bytes (ZeRO++'s qwZ).

The last stage of each copies weights to the message and from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lab.simulate.load import FSDP, Load, Shape, Stage
from lab.simulate.network import Network
from lab.simulate.scatters import line_bytes

INT8 = {"_target_": "lab.exchange.int8.Int8"}  # its codec, at its rate
BLOCK = 1024  # values that share a header of 8 bytes, as in lab/exchange/gather.py


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
    load = Load(shapes, INT8, network)
    own = load.n // load.N
    record = line_bytes(own, BLOCK, bits=8)
    load.codec(4 * own + record, in_torch=29 * own)
    load.wire(network.all_gather(record), inside)
    load.codec(load.N * record + 4 * load.n, in_torch=13 * load.n)
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
