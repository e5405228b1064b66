"""Units of a profile that FSDP2 gathers and frees together, and what their collectives cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from lab.exchange.grouping import FIRST_BUCKET_BYTES, MIB
from lab.model.profile import VALUE_BYTES, Profile
from lab.simulate.load import Load, Settings, Shape, Stage
from lab.simulate.messages import Bucket, parameters
from lab.simulate.network import Network
from lab.simulate.scatters import scatter_of
from lab.simulate.sharded import Unit
from lab.simulate.strategy import Strategy
from lab.sync.pattern import Pattern

FSDP = {"_target_": "torch.distributed.fsdp.FSDP"}  # its copies have a rate of their own


def units_of(profile: Profile, bucket_mb: float | None) -> list[Bucket]:
    """Divide a profile's parameters as lab.sync.fsdp_units does; the model's own unit is the last.

    A profile knows no modules: its layers count as those of one nn.Sequential.
    """
    by_layer: dict[str, Bucket] = {layer.name: {} for layer in profile.layers}
    for name, shape in parameters(profile).items():
        by_layer[name.rpartition(".")[0]][name] = shape
    whole = _joined(by_layer.values())
    if bucket_mb is None:
        return [whole]
    scale = profile.bytes_scale * MIB / VALUE_BYTES
    most = bucket_mb * scale  # values
    least = min(FIRST_BUCKET_BYTES / MIB * scale, most)
    large = [name for name, unit in by_layer.items() if _num_values(unit) >= least]
    if _num_values(whole) >= least and (_num_values(whole) <= most or not large):
        return [whole, {}]
    own = _joined(unit for name, unit in by_layer.items() if name not in large)
    return [*(by_layer[name] for name in large), own]


def costs_of_units(profile: Profile, strategy: Strategy, network: Network) -> list[Unit]:
    """Return the units, in the order of forward, with the stages of their collectives.

    Raises:
        ValueError: ranks cannot share copies of the weights as the strategy says.
    """
    sharers = ranks_of_a_copy(strategy.pattern, network)
    places = {layer.name: place for place, layer in enumerate(profile.layers)}
    found = list[Unit]()
    for bucket in units_of(profile, strategy.bucket_mb):
        at = [places[name.rpartition(".")[0]] for name in bucket]
        layers = range(min(at), max(at) + 1) if at else range(0)
        shapes = [_padded(shape, sharers) for shape in bucket.values()]
        unit = Unit(next(iter(bucket), ""), layers)
        found.append(
            _with_stages(unit, shapes, strategy.exchange, network, sharers) if at else unit
        )
    return found


def _with_stages(
    unit: Unit, shapes: list[Shape], exchange: Settings, network: Network, sharers: int
) -> Unit:
    """Return a unit of padded shapes with its stages."""
    sharing = network.neighbours(sharers)
    inside = sharers <= network.local < network.size
    gather, scatter = Load(shapes, FSDP, sharing), Load(shapes, FSDP, sharing)
    part = gather.num_bytes / sharers
    gather.wire(sharing.all_gather(part), inside)
    gather.codec(2 * (part + gather.num_bytes))  # weights to the message, and from it
    scatter.codec(2 * gather.num_bytes)  # gradients to the message
    scattered = Load(shapes, exchange, sharing)
    scatter_of(exchange)(scattered)
    stages = [*scatter.stages, *(replace(stage, inside=inside) for stage in scattered.stages)]
    if sharers < network.size:
        among = network.across(sharers).all_reduce(part)
        stages.append(Stage("exchange", among.seconds, among.payload_bytes))
    return replace(unit, gather=gather.stages, scatter=stages)


def ranks_of_a_copy(pattern: Pattern, network: Network) -> int:
    """Return the number of ranks that share a copy of the weights.

    Raises:
        ValueError: it does not divide all ranks.
    """
    sizes = {None: network.size, "node": network.local}
    sharers = sizes.get(pattern.shard_size, pattern.shard_size)
    if not isinstance(sharers, int) or sharers < 1 or network.size % sharers:
        raise ValueError(
            f"sync.shard_size={pattern.shard_size}: must be node, null, or a divisor of the "
            f"{network.size} ranks"
        )
    return sharers


def _joined(units: Iterable[Bucket]) -> Bucket:
    return {name: shape for unit in units for name, shape in unit.items()}


def _num_values(unit: Bucket) -> int:
    return sum(map(math.prod, unit.values()))


def _padded(shape: Shape, sharers: int) -> Shape:
    """Return the shape whose first dimension is filled up, so that all ranks have as much of it."""
    return (-(-shape[0] // sharers) * sharers, *shape[1:])
