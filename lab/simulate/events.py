"""The events of one rank's step: forward and backward by layer, and the exchanges.

The slowest rank stands for all, since all meet; the cost of a collective covers the other ranks.
The number of events depends on layers and buckets, not on the number of ranks. `Sharded` is a step
of FSDP2, which gathers weights and scatters gradients unit by unit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lab.exchange.cost import Shape
from lab.exchange.grouping import FIRST_BUCKET_BYTES, MIB
from lab.measure.spans import Span
from lab.model.profile import VALUE_BYTES, Profile
from lab.simulate.costs import FSDP, Load, Settings, Stage, class_of, scatter_of
from lab.simulate.network import Network
from lab.simulate.strategy import Bucket, Groups, Strategy, parameters


@dataclass(frozen=True)
class Compute:
    """The seconds that a layer computes."""

    name: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Exchange:
    """A bucket's stages, which begin once `layer` (its index in forward) has its gradient.

    An index past the last layer: they begin with the step, as they belong to the previous step.
    """

    name: str
    layer: int
    stages: Sequence[Stage]


@dataclass
class Rank:
    """The clock of the computing thread, and the spans so far.

    Attributes:
        contention, burst_s: see Hardware.
        now_s: the time on that thread.
        free_s: when the links, or the thread or stream of exchanges, are free; and, where stages
            inside nodes go their own way, when the links there are.
    """

    contention: float
    burst_s: float = 0.0
    now_s: float = 0.0
    free_s: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    spans: list[Span] = field(default_factory=list)

    @property
    def busy_until_s(self) -> float:
        """When no exchange is under way any more."""
        return max(self.free_s.values())

    def compute(self, row: str, name: str, seconds: float) -> None:
        """Advance the computing thread, slower while an exchange is under way."""
        busy_s = max(0.0, self.busy_until_s - self.now_s)
        delay_s = min(self.contention * seconds, busy_s * self.contention / (1 + self.contention))
        end_s = self.now_s + seconds + delay_s
        self._note(row, name, self.now_s, end_s)
        self.now_s = end_s

    def beside(self, stage: Stage, name: str, earliest_s: float, inside: bool = False) -> float:
        """Run a stage concurrently with compute, first in first out; return when it ends.

        Args:
            inside: beside those between nodes, too.
        """
        free_s = self.free_s[inside]
        start_s = max(earliest_s, free_s)
        shaped = stage.payload_bytes and not stage.inside
        saved_s = min(self.burst_s, start_s - free_s) if shaped else 0.0
        self.free_s[inside] = start_s + max(0.0, stage.seconds - saved_s)
        self._note(stage.row, name, start_s, self.free_s[inside])
        return self.free_s[inside]

    def wait_until(self, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)

    def _note(self, row: str, name: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.spans.append(Span(0, row, name, start_s, end_s))


class Schedule(ABC):
    """The place where exchanges run; models the workers of lab.distributed.worker."""

    @abstractmethod
    def submit(self, exchange: Exchange, rank: Rank) -> None:
        """Start the exchange of a full bucket; earlier buckets have been submitted."""

    def advance(self, rank: Rank) -> None:
        """Continue pending exchanges when a gradient has arrived."""

    @abstractmethod
    def finish(self, rank: Rank, left: int = 0) -> None:
        """Wait for all exchanges but the last `left`."""


class Beside(Schedule):
    """Stages one after the other, concurrent with backward (ThreadWorker, StreamWorker).

    Both levels of a hierarchical exchange are on the one thread or stream.
    """

    def __init__(self) -> None:
        self._ends_s: list[float] = []

    def submit(self, exchange: Exchange, rank: Rank) -> None:
        for stage in exchange.stages:
            rank.beside(stage, exchange.name, rank.now_s)
        self._ends_s.append(rank.busy_until_s)

    def finish(self, rank: Rank, left: int = 0) -> None:
        if len(self._ends_s) > left:
            rank.wait_until(self._ends_s[-1 - left])


@dataclass
class _UnderWay:
    exchange: Exchange
    stages: Iterator[Stage]
    done_s: float = 0.0  # when the collective under way ends


class Turns(Schedule):
    """Stages on backward's thread, while the library's threads communicate (TurnsWorker).

    Codecs delay backward, and a stage begins no sooner than the next gradient's hook.
    """

    def __init__(self) -> None:
        self._under_way: deque[_UnderWay] = deque()

    def submit(self, exchange: Exchange, rank: Rank) -> None:
        job = _UnderWay(exchange, iter(exchange.stages))
        self._under_way.append(job)
        self._go_on(job, rank)

    def advance(self, rank: Rank) -> None:
        for job in tuple(self._under_way):
            if job.done_s > rank.now_s:
                return
            self._go_on(job, rank)

    def finish(self, rank: Rank, left: int = 0) -> None:
        while (awaited := len(self._under_way) - left) > 0:
            for job in tuple(self._under_way)[:awaited]:
                rank.wait_until(job.done_s)
                self._go_on(job, rank)

    def _go_on(self, job: _UnderWay, rank: Rank) -> None:
        """Encode or decode until the next collective is under way, or no stage is left."""
        for stage in job.stages:
            if stage.row == "exchange":
                job.done_s = rank.beside(stage, job.exchange.name, rank.now_s, stage.inside)
                return
            rank.compute(stage.row, job.exchange.name, stage.seconds)
        self._under_way.remove(job)


def both_passes(
    rank: Rank,
    layers: Sequence[Compute],
    exchanges: Sequence[Exchange],
    schedule: Schedule,
    micro_batches: int = 1,
    begin: Callable[[int], None] = lambda place: None,
) -> None:
    """Simulate forward and backward; exchanges start in their order, each when it is ready.

    Args:
        layers: in the order of forward; their times are those of one micro-batch.
        exchanges: in the order of buckets.
        micro_batches: passes over the layers; gradients are exchanged in the last one.
        begin: called before each layer's forward, with its place.
    """
    waiting = deque(exchanges)

    def submit_ready(place: int) -> None:
        while waiting and waiting[0].layer >= place:
            schedule.submit(waiting.popleft(), rank)

    submit_ready(len(layers))
    for number in range(1, micro_batches + 1):
        for place, layer in enumerate(layers):
            begin(place)
            rank.compute("forward", layer.name, layer.forward_s)
        for place, layer in reversed(list(enumerate(layers))):
            rank.compute("backward", layer.name, layer.backward_s)
            schedule.advance(rank)
            if number == micro_batches:
                submit_ready(place)


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

    layers: Sequence[Compute]
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
        self._receive(own, own.gather, self._gather(own, own.gather, self.rank.now_s))
        first = {unit.layers.start: unit for unit in inner}
        before_s = self.rank.now_s  # when the unit before had its weights
        for place, layer in enumerate(self.layers):
            if unit := first.get(place):
                self._receive(unit, unit.gather, self._gather(unit, unit.gather, before_s))
                before_s = self.rank.now_s
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

    def _prefetch(self, waiting: Sequence[Unit]) -> float:
        """Begin the all-gather of the next unit, if there is one; return when it ends."""
        if not waiting:
            return 0.0
        return self._gather(waiting[0], waiting[0].again, self.rank.now_s)

    def _gather(self, unit: Unit, stages: Sequence[Stage], earliest_s: float) -> float:
        """Begin an all-gather; return when it ends."""
        return self._run(unit, stages[:-1], earliest_s)

    def _receive(self, unit: Unit, stages: Sequence[Stage], gathered_s: float) -> None:
        """Wait for a unit's weights, and copy them."""
        self.rank.wait_until(gathered_s)
        self._compute(unit, stages[-1:])

    def _scatter(self, unit: Unit, before_s: float) -> float:
        """Send a unit's gradients once the last one's have left; return when they are summed."""
        self.rank.wait_until(before_s)
        self._compute(unit, unit.scatter[:1])
        return self._run(unit, unit.scatter[1:], self.rank.now_s)

    def _compute(self, unit: Unit, stages: Sequence[Stage]) -> None:
        for stage in stages:
            self.rank.compute(stage.row, unit.name, stage.seconds)

    def _run(self, unit: Unit, stages: Sequence[Stage], end_s: float) -> float:
        """Run stages one after the other, the first not before `end_s`; return when they end."""
        for stage in stages:
            if self.blocks and stage.row == "codec":
                self._compute(unit, [stage])
                end_s = self.rank.now_s
                continue
            # The host of a GPU runs ahead; on CPUs it begins a collective now at the earliest.
            earliest_s = max(end_s, self.rank.now_s) if self.blocks else end_s
            end_s = self.rank.beside(stage, unit.name, earliest_s, stage.inside)
            if self.blocks:
                self.rank.wait_until(end_s)
        return end_s


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
    inside = groups.inside(sharing)
    gather = _in_bytes if strategy.sharding.all_gather == "int8" else _in_float32
    whole = gather(shapes, sharing, inside)
    again = _in_float32(shapes, second, groups.inside(second), second=True) if second else whole
    scatter = Load(shapes, FSDP, sharing)
    scatter.codec(2 * scatter.num_bytes)  # gradients to the message
    scattered = Load(shapes, class_of(strategy.exchange), sharing)
    if groups.levels:
        _in_two_levels(scattered, strategy.exchange)
    else:
        scatter_of(strategy.exchange)(scattered)
    scatter.stages += [replace(s, inside=s.inside or inside) for s in scattered.stages]
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
    stages = [replace(s, inside=inside and s.row == "exchange") for s in load.stages]
    Load(shapes, FSDP, network, stages).codec(2 * (load.num_bytes / load.N + load.num_bytes))
    return stages


def _in_two_levels(load: Load, exchange: Settings) -> None:
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


def _joined(units: Iterable[Bucket]) -> Bucket:
    return {name: shape for unit in units for name, shape in unit.items()}


def _num_values(unit: Bucket) -> int:
    return sum(map(math.prod, unit.values()))


def _padded(shape: Shape, sharers: int) -> Shape:
    """Return the shape whose first dimension is filled up, so that all ranks have as much of it."""
    return (-(-shape[0] // sharers) * sharers, *shape[1:])
