"""Stages of the reduce-scatters of a unit's gradients: torch's own, exact ones, and codecs'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lab.simulate.costs import exchange_of
from lab.simulate.load import FSDP, Load, Settings, class_of


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

    Before them parts are laid out by local rank, as lab/exchange/two_levels.py does.
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
