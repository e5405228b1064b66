"""A step of FSDP2, which gathers weights and scatters gradients unit by unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from lab.exchange.cost import Shape
from lab.exchange.grouping import FIRST_BUCKET_BYTES, MIB
from lab.model.profile import VALUE_BYTES, Profile
from lab.simulate.costs import FSDP, Load, Stage, add_scatter, class_of
from lab.simulate.network import Network
from lab.simulate.step import LayerCompute, Rank
from lab.simulate.strategy import Bucket, Strategy, parameters, ranks_of_a_copy
from lab.sync.pattern import ranks_of_second_shard


@dataclass(frozen=True)
class Unit:
    """Layers whose weights are gathered and freed together, and what moves them.

    Attributes:
        layers: their places in forward, which follow each other; the model's own unit, which stays
            gathered from forward to backward, may have layers anywhere.
        gather: the all-gather, and last the copies of weights to its message and from it.
        again: the same before backward.
        scatter: first the copies of gradients to a message, then the reduce-scatter, and the
            all-reduce among copies of the weights. A unit without parameters has no stages.
    """

    name: str
    layers: range
    gather: Sequence[Stage] = ()
    again: Sequence[Stage] = ()
    scatter: Sequence[Stage] = ()


@dataclass
class Sharded:
    """Forward and backward of one rank, as torch.distributed.fsdp runs them.

    Where the host runs ahead of a GPU, a unit's all-gather begins as soon as the unit before it has
    its weights, in both directions, and a reduce-scatter runs beside backward of the next unit, of
    which at most one is under way. On CPUs each collective returns when it is done, so
    nothing is hidden.

    Args:
        units: in the order of forward, the model's own last.
        blocks: collectives return when they are done.
    """

    layers: Sequence[LayerCompute]
    units: Sequence[Unit]
    rank: Rank
    blocks: bool

    def run(self, micro_batches: int) -> None:
        """Simulate a step's passes. Only the last backward scatters."""
        for number in range(1, micro_batches + 1):
            self._forward()
            self._backward(last=number == micro_batches)
        self.rank.wait_until(self.rank.busy_until_s)

    def stages(self, micro_batches: int) -> list[Stage]:
        """List the stages of a step, those of all micro-batches."""
        *inner, own = self.units
        gathers = [stage for unit in inner for stage in (*unit.gather, *unit.again)]
        scatters = [stage for unit in self.units for stage in unit.scatter]
        return [*([*gathers, *own.gather] * micro_batches), *scatters]

    def _forward(self) -> None:
        *inner, own = self.units
        first = {unit.layers.start: unit for unit in inner}
        before_s = self._gather(own, self.rank.now_s)  # when the unit before had its weights
        for place, layer in enumerate(self.layers):
            if unit := first.get(place):
                before_s = self._gather(unit, before_s)
            self.rank.compute("forward", layer.name, layer.forward_s)

    def _backward(self, last: bool) -> None:
        *inner, own = self.units
        waiting = inner[::-1]
        next_s = self._prefetch(waiting)
        scattered_s = 0.0
        for place, layer in reversed(list(enumerate(self.layers))):
            if waiting and place == waiting[0].layers.stop - 1:
                self._receive(waiting[0], waiting[0].again, next_s)
                next_s = self._prefetch(waiting[1:])
            self.rank.compute("backward", layer.name, layer.backward_s)
            if waiting and place == waiting[0].layers.start:
                unit = waiting.pop(0)
                scattered_s = self._scatter(unit, scattered_s) if last else 0.0
        if last:
            self._scatter(own, scattered_s)

    def _gather(self, unit: Unit, earliest_s: float) -> float:
        """Gather a unit's weights for forward; return when it has them."""
        self._receive(unit, unit.gather, self._run(unit, unit.gather[:-1], earliest_s))
        return self.rank.now_s

    def _prefetch(self, waiting: Sequence[Unit]) -> float:
        """Begin the all-gather of the next unit, if there is one; return when it ends."""
        return self._run(waiting[0], waiting[0].again[:-1], self.rank.now_s) if waiting else 0.0

    def _receive(self, unit: Unit, stages: Sequence[Stage], gathered_s: float) -> None:
        """Wait for a unit's weights, and copy them."""
        self.rank.wait_until(gathered_s)
        for stage in stages[-1:]:
            self.rank.compute(stage.row, unit.name, stage.seconds)

    def _scatter(self, unit: Unit, before_s: float) -> float:
        """Send a unit's gradients once the last one's have left; return when they are summed."""
        self.rank.wait_until(before_s)
        for stage in unit.scatter[:1]:
            self.rank.compute(stage.row, unit.name, stage.seconds)
        return self._run(unit, unit.scatter[1:], self.rank.now_s)

    def _run(self, unit: Unit, stages: Sequence[Stage], end_s: float) -> float:
        """Run stages one after the other, the first not before `end_s`; return when they end."""
        for stage in stages:
            if not self.blocks:  # the host of a GPU runs ahead
                end_s = self.rank.beside(stage, unit.name, end_s, stage.intra_node)
            elif stage.row == "codec":
                self.rank.compute(stage.row, unit.name, stage.seconds)
                end_s = self.rank.now_s
            else:  # on CPUs it begins a collective now at the earliest
                earliest_s = max(end_s, self.rank.now_s)
                end_s = self.rank.beside(stage, unit.name, earliest_s, stage.intra_node)
                self.rank.wait_until(end_s)
        return end_s


@dataclass(frozen=True)
class Groups:
    """Networks of the groups of a strategy whose units are gathered.

    Attributes:
        world: all ranks.
        sharing: ranks that share a copy of the weights.
        second: those that keep gathered weights sharded for backward; None: all of `sharing` do.
        copies: ranks that hold the same part of each copy; None: there is one copy.
        levels: gradients are summed inside nodes before they cross.
    """

    world: Network
    sharing: Network
    second: Network | None
    copies: Network | None
    levels: bool

    @classmethod
    def of(cls, strategy: Strategy, network: Network) -> Groups:
        """Divide the ranks of `network`.

        Raises:
            ValueError: they cannot be divided as the strategy says.
        """
        sharers = ranks_of_a_copy(strategy.pattern, network)
        sharing = network.neighbours(sharers)
        copies = network.inter_node(sharers) if sharers < network.size else None
        reshard, levels = strategy.pattern.reshard, False
        node = partial(_ranks_of_a_node, f"sync.reshard={reshard}", network)
        second = ranks_of_second_shard(reshard, network.size, node)
        if strategy.pattern.reduce_scatter == "two_levels":
            key = "sync.reduce_scatter=two_levels"
            levels = 1 < _ranks_of_a_node(key, sharing) < sharers
        kept = network.neighbours(second) if second else None
        return cls(network, sharing, kept, copies, levels)

    def is_intra_node(self, group: Network) -> bool:
        """Return whether a group leaves the links between nodes alone, where there are some."""
        return group.size <= self.world.local < self.world.size


def _ranks_of_a_node(key: str, network: Network) -> int:
    if network.size % network.local:
        raise ValueError(
            f"{key}: {network.size} ranks cannot be divided into nodes of {network.local} ranks "
            "each"
        )
    return network.local


def units_of(profile: Profile, bucket_mb: float | None) -> list[Bucket]:
    """Divide a profile's parameters as lab.sync.fsdp_units does; the model's own unit is the last.

    A profile knows no modules: its layers count as those of one nn.Sequential.
    """
    by_layer: dict[str, Bucket] = {layer.name: {} for layer in profile.layers}
    for name, shape in parameters(profile).items():
        by_layer[name.rpartition(".")[0]][name] = shape
    whole = {name: shape for unit in by_layer.values() for name, shape in unit.items()}
    if bucket_mb is None:
        return [whole]
    scale = profile.bytes_scale * MIB / VALUE_BYTES
    most = bucket_mb * scale  # values
    least = min(FIRST_BUCKET_BYTES / MIB * scale, most)
    large = [name for name, unit in by_layer.items() if _num_values(unit) >= least]
    if _num_values(whole) >= least and (_num_values(whole) <= most or not large):
        return [whole, {}]
    small = (unit for name, unit in by_layer.items() if name not in large)
    own = {name: shape for unit in small for name, shape in unit.items()}
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
        sharers = groups.sharing.size  # rows are filled up, so that all have as many
        shapes = [(-(-rows // sharers) * sharers, *rest) for rows, *rest in bucket.values()]
        unit = Unit(next(iter(bucket), ""), layers)
        found.append(_with_stages(unit, shapes, strategy, groups) if at else unit)
    return found


def _with_stages(unit: Unit, shapes: list[Shape], strategy: Strategy, groups: Groups) -> Unit:
    """Return a unit of padded shapes with its stages."""
    sharing, second = groups.sharing, groups.second
    inside = groups.is_intra_node(sharing)
    if strategy.pattern.all_gather == "int8":
        whole = _in_bytes(shapes, sharing, inside)
    else:
        whole = _in_float32(shapes, sharing, inside)
    again = (
        _in_float32(shapes, second, groups.is_intra_node(second), second=True) if second else whole
    )
    scatter = Load(shapes, FSDP, sharing)
    scatter.codec(2 * scatter.num_bytes)  # gradients to the message
    scattered = Load(shapes, class_of(strategy.exchange), sharing)
    if groups.levels:
        _in_two_levels(scattered, strategy)
    else:
        add_scatter(scattered, strategy.exchange)
    scatter.stages += [replace(s, intra_node=s.intra_node or inside) for s in scattered.stages]
    if groups.copies:
        scatter.wire(groups.copies.all_reduce(scatter.num_bytes / sharing.size))
    return replace(unit, gather=whole, again=again, scatter=scatter.stages)


def _in_float32(
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
    # A rank's part is copied to the message, all parts from it, and a part of the second shard.
    load.codec(2 * (part + load.num_bytes + (part if second else 0.0)))
    return load.stages


def _in_bytes(shapes: Sequence[Shape], network: Network, inside: bool) -> list[Stage]:
    """Gather a byte for each value, and decode all ranks' parts. Arguments as `_in_float32`."""
    from lab.simulate import recorded  # with torch, which settings and help do not need

    load = Load(shapes, "Int8", network)  # at the rate of that codec
    recorded.add_gather(load)
    stages = [replace(s, intra_node=inside and s.row == "exchange") for s in load.stages]
    Load(shapes, FSDP, network, stages).codec(2 * (load.num_bytes / load.N + load.num_bytes))
    return stages


def _in_two_levels(load: Load, strategy: Strategy) -> None:
    """Append a reduce-scatter inside each node and then one between nodes (ZeRO++'s qgZ).

    Before them parts are laid out by local rank, as lab.exchange.scatter.TwoLevels does.
    """
    network = load.network
    Load(load.shapes, FSDP, network, load.stages).codec(2 * load.num_bytes)
    first = Load(load.shapes, load.rate, network.intra_node())
    add_scatter(first, strategy.exchange)
    load.stages += [replace(stage, intra_node=True) for stage in first.stages]
    sums = [(load.n // network.local,)]
    rail = network.rail(network.local)
    add_scatter(Load(sums, load.rate, rail, load.stages), strategy.exchange)


def _num_values(unit: Bucket) -> int:
    return sum(map(math.prod, unit.values()))
