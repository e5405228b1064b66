"""Units of a profile that FSDP2 gathers and frees together, and what their collectives cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from lab.exchange.cost import Shape
from lab.exchange.grouping import FIRST_BUCKET_BYTES, MIB
from lab.model.profile import VALUE_BYTES, Profile
from lab.simulate.groups import Groups
from lab.simulate.load import FSDP, Load, class_of
from lab.simulate.messages import Bucket, parameters
from lab.simulate.network import Network
from lab.simulate.scatters import GATHERS, exact, in_two_levels, scatter_of
from lab.simulate.sharded import Unit
from lab.simulate.strategy import Strategy


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
    groups = Groups.of(strategy, network)
    places = {layer.name: place for place, layer in enumerate(profile.layers)}
    found = list[Unit]()
    for bucket in units_of(profile, strategy.bucket_mb):
        at = [places[name.rpartition(".")[0]] for name in bucket]
        layers = range(min(at), max(at) + 1) if at else range(0)
        shapes = [_padded(shape, groups.sharing.size) for shape in bucket.values()]
        unit = Unit(next(iter(bucket), ""), layers)
        found.append(_with_stages(unit, shapes, strategy, groups) if at else unit)
    return found


def _with_stages(unit: Unit, shapes: list[Shape], strategy: Strategy, groups: Groups) -> Unit:
    """Return a unit of padded shapes with its stages."""
    sharing, second = groups.sharing, groups.second
    whole = GATHERS[strategy.sharding.all_gather](shapes, sharing, groups.inside(sharing))
    again = exact(shapes, second, groups.inside(second), second=True) if second else whole
    scatter = Load(shapes, FSDP, sharing)
    scatter.codec(2 * scatter.num_bytes)  # gradients to the message
    scattered = Load(shapes, class_of(strategy.exchange), sharing)
    if groups.levels:
        in_two_levels(scattered, strategy.exchange)
    else:
        scatter_of(strategy.exchange)(scattered)
    inside = groups.inside(sharing)
    scatter.stages += [replace(s, inside=s.inside or inside) for s in scattered.stages]
    if groups.copies:
        scatter.wire(groups.copies.all_reduce(scatter.num_bytes / sharing.size))
    return replace(unit, gather=whole, again=again, scatter=scatter.stages)


def _joined(units: Iterable[Bucket]) -> Bucket:
    return {name: shape for unit in units for name, shape in unit.items()}


def _num_values(unit: Bucket) -> int:
    return sum(map(math.prod, unit.values()))


def _padded(shape: Shape, sharers: int) -> Shape:
    """Return the shape whose first dimension is filled up, so that all ranks have as much of it."""
    return (-(-shape[0] // sharers) * sharers, *shape[1:])
