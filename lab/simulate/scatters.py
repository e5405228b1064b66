"""The reduce-scatters and all-gathers of sharded strategies: their stages, and what they move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lab.exchange.cost import Shape
from lab.simulate.costs import exchange_of
from lab.simulate.load import FSDP, Load, Settings, Stage, class_of
from lab.simulate.network import Network


def scatter_of(exchange: Settings) -> Callable[[Load], None]:
    """Return what appends the stages of a reduce-scatter to a Load of padded shapes.

    Args:
        exchange: NoExchange: torch's own.

    Raises:
        ValueError: the exchange has no reduce-scatter.
    """
    from lab.exchange import scatter  # with torch, which settings and help do not need
    from lab.exchange.allreduce import AllReduce

    if class_of(exchange) == "NoExchange":
        return _of_torch
    made = exchange_of(exchange)
    scatter.scatter_of(made)
    if isinstance(made, AllReduce):
        return partial(_exact, made.exact)

    def add(load: Load) -> None:
        load.add(made, part="scatter")

    return add


def in_two_levels(load: Load, exchange: Settings) -> None:
    """Append a reduce-scatter inside each node and then one between nodes (ZeRO++'s qgZ).

    Before them parts are laid out by local rank, as lab.exchange.scatter.TwoLevels does.
    """
    scatter, network = scatter_of(exchange), load.network
    Load(load.shapes, FSDP, network, load.stages).codec(2 * load.num_bytes)
    first = Load(load.shapes, load.rate, network.inside())
    scatter(first)
    load.stages += [replace(stage, inside=True) for stage in first.stages]
    sums = [(load.n // network.local,)]
    scatter(Load(sums, load.rate, network.rail(network.local), load.stages))


def _of_torch(load: Load) -> None:
    """Over Gloo it is an all-reduce, of which each rank keeps a part."""
    if load.network.hardware.library == "gloo":
        load.wire(load.network.all_reduce(load.num_bytes))
    else:
        load.wire(load.network.reduce_scatter(load.num_bytes / load.N))


def _exact(exact: bool, load: Load) -> None:
    part = load.num_bytes / load.N
    if exact:
        load.wire(load.network.reduce_scatter(part))
        return
    load.codec(1.5 * load.num_bytes)
    load.wire(load.network.all_to_all(part / 2))
    load.codec(load.num_bytes / 2 + part)


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
