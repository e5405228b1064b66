"""Predict a step from a profile, a strategy and hardware, by simulating one rank's events.

The slowest rank stands for all, since all meet; the cost of a collective covers the other ranks.
The number of events depends on layers and buckets, not on the number of ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lab.measure import Span
from lab.model.profile import Profile
from lab.simulate.costs import (
    Load,
    Stage,
    add_scatter,
    class_of,
    exchange_of,
    phases_of,
    ways_of,
)
from lab.simulate.hardware import Hardware
from lab.simulate.network import Network
from lab.simulate.strategy import (
    EXACT,
    Bucket,
    Strategy,
    messages_of_fragments,
    parameters,
    products_s,
    ranks_of_a_copy,
    update_beside,
)
from lab.sync.pattern import MOMENTUM, Begin, Transfer, gradsync, send_order

# Of PrioritySync: the second begins with an exchange under way; two more for it to settle.
SETTLING_STEPS = 4


@dataclass(frozen=True)
class LayerCompute:
    """The seconds that a layer computes."""

    name: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class BucketExchange:
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
        contention, burst_s, codec_contention: see Hardware.
        passing_s: in which kernels of a library pass over memory for each byte that they send:
            compute beside them takes as much longer as that is of their time.
        now_s: the time on that thread.
        free_s: when the links, or the thread or stream of exchanges, are free; and, where stages
            inside nodes go their own way, when the links there are.
    """

    contention: float
    burst_s: float = 0.0
    codec_contention: float = 0.0
    passing_s: float = 0.0
    now_s: float = 0.0
    free_s: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    spans: list[Span] = field(default_factory=list)
    _beside: deque[tuple[float, float]] = field(default_factory=deque)  # end, and contention

    @property
    def busy_until_s(self) -> float:
        """When no exchange is under way any more."""
        return max(self.free_s.values())

    def compute(self, row: str, name: str, seconds: float) -> None:
        """Advance the computing thread, slower while an exchange is under way."""
        end_s = self.now_s
        while self._beside:
            until_s, contention = self._beside[0]
            done_s = max(0.0, until_s - end_s) / (1 + contention)
            if done_s > seconds:
                end_s, seconds = end_s + (1 + contention) * seconds, 0.0
                break
            self._beside.popleft()
            end_s, seconds = max(end_s, until_s), seconds - done_s
        end_s += seconds
        self._note(row, name, self.now_s, end_s)
        self.now_s = end_s

    def beside(self, stage: Stage, name: str, earliest_s: float, inside: bool = False) -> float:
        """Run a stage concurrently with compute, first in first out; return when it ends.

        Args:
            inside: beside those between nodes, too.
        """
        free_s = self.free_s[inside]
        start_s = max(earliest_s, free_s)
        shaped = stage.payload_bytes and not stage.intra_node
        saved_s = min(self.burst_s, start_s - free_s) if shaped else 0.0
        self.free_s[inside] = start_s + max(0.0, stage.seconds - saved_s)
        sending = self.passing_s * stage.payload_bytes / stage.seconds if stage.seconds else 0.0
        self._beside.append((self.free_s[inside], self.contention + sending))
        self._note(stage.row, name, start_s, self.free_s[inside])
        return self.free_s[inside]

    def wait_until(self, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)

    def _note(self, row: str, name: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.spans.append(Span(0, row, name, start_s, end_s))


class Beside:
    """Stages one after the other, concurrent with backward (ThreadWorker, StreamWorker).

    Both levels of a hierarchical exchange are on the one thread or stream.
    """

    def __init__(self) -> None:
        self._ends_s: list[float] = []

    def submit(self, exchange: BucketExchange, rank: Rank) -> None:
        """Start the exchange of a full bucket; earlier buckets have been submitted."""
        ready_s = rank.now_s
        for stage in exchange.stages:
            rank.beside(stage, exchange.name, ready_s)
            if stage.row == "codec":  # wherever it runs, compute has that much less of the device
                rank.now_s += rank.codec_contention * stage.seconds
        self._ends_s.append(rank.busy_until_s)

    def advance(self, rank: Rank) -> None:
        """Continue pending exchanges when a gradient has arrived."""

    def finish(self, rank: Rank, left: int = 0) -> None:
        """Wait for all exchanges but the last `left`."""
        if len(self._ends_s) > left:
            rank.wait_until(self._ends_s[-1 - left])


@dataclass
class _InFlight:
    exchange: BucketExchange
    stages: Iterator[Stage]
    job: int  # its position among all jobs, from 1
    stage: int = 0  # how many collectives it has begun
    done_s: float = 0.0  # when the collective under way ends


class OneThread:
    """Stages on backward's thread, while the library's threads communicate (TurnsWorker).

    Codecs delay backward, and a stage begins no sooner than the next gradient's hook, and not
    before an earlier job has begun its own. Methods are those of Beside.
    """

    def __init__(self) -> None:
        self._under_way: deque[_InFlight] = deque()
        self._num_jobs = 0

    def submit(self, exchange: BucketExchange, rank: Rank) -> None:
        self.advance(rank)
        self._num_jobs += 1
        job = _InFlight(exchange, iter(exchange.stages), self._num_jobs)
        self._under_way.append(job)
        self._go_on(job, rank)

    def advance(self, rank: Rank) -> None:
        allowed = math.inf  # the stage that the job before is in; inf: there is none
        for job in tuple(self._under_way):
            ready = job.stage < allowed and job.done_s <= rank.now_s
            if not ready or self._go_on(job, rank):
                allowed = job.stage

    def finish(self, rank: Rank, left: int = 0) -> None:
        while self._under_way and self._under_way[0].job <= self._num_jobs - left:
            rank.wait_until(self._under_way[0].done_s)
            self._go_on(self._under_way[0], rank)
            self.advance(rank)

    def _go_on(self, job: _InFlight, rank: Rank) -> bool:
        """Encode or decode until the next collective is under way; False: no stage is left."""
        for stage in job.stages:
            if stage.row == "exchange":
                job.stage += 1
                job.done_s = rank.beside(stage, job.exchange.name, rank.now_s, stage.intra_node)
                return True
            rank.compute(stage.row, job.exchange.name, stage.seconds)
        self._under_way.remove(job)
        return False


Schedule = (
    Beside | OneThread
)  # the place where exchanges run: the workers of lab.distributed.worker


def both_passes(
    rank: Rank,
    layers: Sequence[LayerCompute],
    exchanges: Sequence[BucketExchange],
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
class Step:
    """One optimizer step of the slowest rank, which stands for all.

    Attributes:
        step_s: duration in seconds.
        payload_bytes: bytes that the busiest rank sends.
        across_bytes: bytes that the ranks of the busiest node together send to other nodes; NaN:
            not known, as of trees and stars.
        spans: forward, backward, exchange and codec.
    """

    step_s: float
    payload_bytes: float
    across_bytes: float
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, step_s: float, stages: Sequence[Stage], spans: Iterable[Span]) -> Step:
        """Add up what the stages of a step send."""
        payload_bytes = sum((stage.payload_bytes for stage in stages), 0.0)
        across_bytes = sum((stage.across_bytes for stage in stages), 0.0)
        return cls(step_s, payload_bytes, across_bytes, tuple(spans))


@dataclass(frozen=True)
class Prediction:
    """A step, its exposed communication and its speedup.

    Attributes:
        exposed_s: step time beyond that without any exchange, on as many ranks.
        speedup: over one rank without any exchange; of weak scaling if `weak`.
    """

    step: Step
    exposed_s: float
    speedup: float
    efficiency: float


def predict(
    profile: Profile,
    hardware: Hardware,
    strategy: Strategy,
    world_size: int,
    batch_size: int,
    weak: bool = False,
) -> Prediction:
    """Predict the step of a strategy on `world_size` ranks.

    Args:
        batch_size: global, in samples.
        weak: compare with one rank at the same per-rank batch size. It accumulates as many
            micro-batches.

    Raises:
        ValueError: the hardware has too few ranks, or a step of one rank takes no time.
    """
    per_rank_batch_size = batch_size // world_size
    step = simulate(profile, hardware, strategy, world_size, per_rank_batch_size)
    no_exchange = strategy.without_exchange()
    ceiling = simulate(profile, hardware, no_exchange, world_size, per_rank_batch_size)
    alone = simulate(profile, hardware, no_exchange, 1, per_rank_batch_size if weak else batch_size)
    if not alone.step_s:
        raise ValueError(f"profile={profile.name}: all times are 0, so one rank's step takes none")
    speedup = (world_size if weak else 1) * alone.step_s / step.step_s
    exposed_s = step.step_s - ceiling.step_s
    return Prediction(step, exposed_s, speedup, speedup / world_size)


def simulate(
    profile: Profile,
    hardware: Hardware,
    strategy: Strategy,
    world_size: int,
    per_rank_batch_size: int,
) -> Step:
    """Simulate the mean step of a run on `world_size` ranks. ValueError as in `predict`."""
    scene = _Scene(profile, Network(hardware, world_size), strategy, per_rank_batch_size)
    if strategy.pattern.gathers_units:
        return _sharded_step(scene)
    ways = [_mean_step(replace(scene, strategy=way)) for way in _tried(strategy)]
    return min(ways, key=lambda step: step.step_s)


def _tried(strategy: Strategy) -> list[Strategy]:
    """List the ways that a run times whole steps of, to keep the fastest."""
    if strategy.pattern.waits_in_forward and strategy.tries:
        return [replace(strategy, tries=False), replace(strategy, pattern=gradsync(overlap=True))]
    if class_of(strategy.exchange) == "Auto":  # for each bucket its own, or one for all
        alike = ways_of(strategy.exchange).values()
        return [strategy, *(replace(strategy, exchange=way) for way in alike)]
    return [strategy]


@dataclass(frozen=True)
class _Scene:
    """A model on a rank, among others that exchange with it."""

    profile: Profile
    network: Network
    strategy: Strategy
    per_rank_batch_size: int

    @property
    def exchanges(self) -> bool:
        """Whether anything is exchanged."""
        return self.network.size > 1 and self.strategy.exchanges

    @property
    def by_kernels(self) -> bool:
        """Whether kernels on the device exchange gradients: copies to servers need none."""
        served = self.network.hardware.server is not None and self.network.num_nodes == 1
        copied = served and class_of(self.strategy.exchange) == "Star"
        return self.exchanges and not copied

    def rank(self) -> Rank:
        """Return a rank at time 0, whose compute an exchange beside it slows."""
        hardware = self.network.hardware
        passes = hardware.wire_passes if self.by_kernels else 0.0
        passing_s = passes / hardware.codec_bytes_per_s
        return Rank(hardware.contention, hardware.burst_s, hardware.codec_contention, passing_s)

    def layers(self) -> list[LayerCompute]:
        """Return the layers' times on the slowest rank, of one micro-batch."""
        profile, network, hardware = self.profile, self.network, self.network.hardware
        micro_batch_size = self.per_rank_batch_size // self.strategy.accumulate
        # Without a device of their own, ranks slow each other.
        shared, threads = 1.0, profile.num_threads
        if threads is not None and network.size > 1:
            shared = hardware.host_factor(network.size * threads)
        engaged = hardware.engage / self.strategy.pattern.every if self.by_kernels else 0.0
        slowest = network.slowest_factor * shared * (1 + engaged)
        return [
            LayerCompute(
                layer.name,
                slowest * profile.forward_s(layer, micro_batch_size),
                slowest * profile.backward_s(layer, micro_batch_size),
            )
            for layer in profile.layers
        ]

    @property
    def besides_s(self) -> float:
        """Time of a step besides forward, backward and exchange; `overhead_s` comes on top."""
        network, hardware = self.network, self.network.hardware
        rest_s = self.profile.rest_s(self.per_rank_batch_size) or 0.0
        rest_s = max(0.0, rest_s + self.update_s) * hardware.host_factor(network.size)
        if self.exchanges and hardware.num_cores and self.profile.num_threads is None:
            rest_s += max(0.0, network.size / hardware.num_cores - 1) * hardware.step_cpu_s
        return hardware.overhead_s + rest_s + hardware.overhead_s_per_rank * (network.local - 1)

    @property
    def update_s(self) -> float:
        """Time of the optimizer's passes over memory that are not in the profile's times."""
        pattern, update = self.strategy.pattern, self.strategy.update or MOMENTUM
        beside, rate = update_beside(self.profile, self.network.hardware, update)
        passes = beside.on_shards if pattern.gathers_units else beside.passes
        sharers = ranks_of_a_copy(pattern, self.network) if pattern.parts_the_update else 1
        products = products_s(self.profile, self.network.hardware, update)
        return (passes * self.profile.gradient_bytes / rate + products) / sharers

    def least_s(self, stages: Iterable[Stage], num_buckets: int) -> float:
        """Return the seconds in which a node prepares samples or a host launches: the longer.

        Both go on while the devices work; see Hardware and Host.

        Args:
            num_buckets: of the step's exchanges; 0: gradients have no hooks either.
        """
        rate, host = self.network.hardware.input_samples_per_s, self.network.hardware.host
        input_s = self.network.local * self.per_rank_batch_size / rate if rate else 0.0
        if host is None:
            return input_s
        hooked = len(parameters(self.profile)) if num_buckets else 0
        launching_s = (
            host.kernel_s * self.strategy.accumulate * (self.profile.num_kernels or 0)
            + host.parameter_s * hooked
            + host.bucket_s * num_buckets
            + host.codec_s * sum(stage.calls for stage in stages)
        )
        return max(input_s, launching_s)


def _mean_step(scene: _Scene) -> Step:
    profile, strategy, network = scene.profile, scene.strategy, scene.network
    kinds = [
        (of_run * share, _step(scene, planned))
        for of_run, exchange in phases_of(strategy.exchange)
        for share, planned in kinds_of_steps(profile, replace(strategy, exchange=exchange), network)
    ]
    step_s, payload_bytes, across_bytes = (
        sum(share * getattr(step, key) for share, step in kinds)
        for key in ("step_s", "payload_bytes", "across_bytes")
    )
    return Step(step_s, payload_bytes, across_bytes, kinds[0][1].spans)


def _step(scene: _Scene, planned: Sequence[BucketExchange]) -> Step:
    """Simulate one step with the exchanges that run in it."""
    profile, strategy, network = scene.profile, scene.strategy, scene.network
    pattern = strategy.pattern
    in_turns = network.hardware.library == "gloo" and exchange_of(strategy.exchange).staged
    schedule = OneThread() if in_turns and pattern.overlaps else Beside()
    rank, layers, besides_s = scene.rank(), scene.layers(), scene.besides_s
    stages = [stage for each in planned for stage in each.stages]
    least_s = scene.least_s(stages, num_buckets=sum(bool(each.stages) for each in planned))
    if pattern.waits_in_forward:
        passes_s, spans = steady(layers, planned, schedule, rank, besides_s, strategy.accumulate)
        return Step.of(max(passes_s, least_s), stages, spans)
    both_passes(rank, layers, planned, schedule, strategy.accumulate)
    schedule.finish(rank)
    back: Sequence[BucketExchange] = []  # exchanges of weights after the update
    if Transfer.WEIGHTS_FROM_ROOT in pattern.transfers:  # the way that gradients came
        back = planned
    elif Transfer.PARTS_OF_WEIGHTS in pattern.transfers:  # in full, whatever type gradients had
        (buckets,) = messages_of_fragments(profile, strategy, network.hardware.on_gpu)
        back = exchanges(profile, replace(strategy, exchange=EXACT), network, buckets)
    for exchange in back:
        schedule.submit(exchange, rank)
        stages += exchange.stages
    schedule.finish(rank)
    return Step.of(max(rank.now_s + besides_s, least_s), stages, rank.spans)


def _sharded_step(scene: _Scene) -> Step:
    from lab.simulate.fsdp import Sharded, costs_of_units  # which is made of ranks as here

    rank, accumulate = scene.rank(), scene.strategy.accumulate
    units = costs_of_units(scene.profile, scene.strategy, scene.network)
    blocks = scene.network.hardware.library == "gloo"
    sharded = Sharded(scene.layers(), units, rank, blocks)
    sharded.run(accumulate)
    stages = sharded.stages(accumulate)
    least_s = scene.least_s(stages, num_buckets=sum(each.row == "exchange" for each in stages))
    return Step.of(max(rank.now_s + scene.besides_s, least_s), stages, rank.spans)


def stages_of_step(profile: Profile, strategy: Strategy, network: Network) -> list[Stage]:
    """List the different stages of a strategy's steps."""
    if strategy.pattern.gathers_units:
        from lab.simulate.fsdp import costs_of_units

        units = costs_of_units(profile, strategy, network)
        return [stage for unit in units for stage in (*unit.gather, *unit.again, *unit.scatter)]
    kinds = kinds_of_steps(profile, strategy, network)
    return [stage for _, planned in kinds for exchange in planned for stage in exchange.stages]


def kinds_of_steps(
    profile: Profile, strategy: Strategy, network: Network
) -> list[tuple[float, list[BucketExchange]]]:
    """List the kinds of steps of a round: the share of each, and the exchanges that run in it.

    Exchanges within a step count as an equal share in each step of the round. Those that outlast
    their step, of one fragment after another, run in `delay` steps each, and in others nothing.
    """
    pattern = strategy.pattern
    parts = [
        exchanges(profile, strategy, network, part)
        for part in messages_of_fragments(profile, strategy, network.hardware.on_gpu)
    ]
    if pattern.begins is not Begin.NEXT_STEPS:
        return [(1.0, [exchange for part in parts for exchange in part])]
    busy = pattern.delay / pattern.every
    return [*((busy, part) for part in parts), (1 - busy * len(parts), [])]


def exchanges(
    profile: Profile, strategy: Strategy, network: Network, planned: Sequence[Bucket]
) -> list[BucketExchange]:
    """Return the exchange of each bucket: its stages in one step."""
    places = {layer.name: place for place, layer in enumerate(profile.layers)}
    pattern = strategy.pattern
    steps = pattern.delay if pattern.begins is Begin.NEXT_STEPS else pattern.every
    share = pattern.num_exchanges / (max(1, len(pattern.transfers)) * steps)
    made = exchange_of(strategy.exchange)
    in_parts = Transfer.PARTS_OF_GRADIENTS in pattern.transfers and not made.exact
    # Layer 0 is the last to have a gradient; past the last layer is the previous step.
    after = len(places) if pattern.outlasts_step else 0
    found = []
    for bucket in planned:
        first, *others = bucket
        label = f"{first} and {len(others)} more" if others else first
        # A key is layer.kind, or with a part of it: layer.kind[start:stop].
        ready = min(places[name.partition("[")[0].rpartition(".")[0]] for name in bucket)
        begins = ready if pattern.begins is Begin.DURING_BACKWARD else after
        shapes = list(bucket.values())
        if in_parts:  # an exchange's first half, of parts that are filled up alike
            part = -(-sum(map(math.prod, shapes)) // network.size)
            load = Load([(part * network.size,)], class_of(strategy.exchange), network)
            add_scatter(load, strategy.exchange)
        else:
            load = Load(shapes, class_of(strategy.exchange), network)
            load.add(made, share=share)
        found.append(BucketExchange(label, begins, load.stages))
    return found


def steady(
    layers: Sequence[LayerCompute],
    parts: Sequence[BucketExchange],
    schedule: Schedule,
    rank: Rank,
    besides_s: float,
    micro_batches: int,
) -> tuple[float, tuple[Span, ...]]:
    """Simulate steps of PrioritySync: a layer's forward waits for its own parts alone.

    Args:
        parts: in the order of buckets; `layer` of each is the first to read one of its parameters,
            and the last to have a gradient of them.
        rank: at time 0.
        besides_s: seconds of a step besides forward and backward, in which exchanges go on.

    Returns:
        Seconds of the last step, and its spans, from its beginning.
    """
    # The order of sending is planned as in training: by times of backward, and of parts alone.
    ready_s = [sum(layer.backward_s for layer in layers[part.layer :]) for part in parts]
    send_s = [sum(stage.seconds for stage in part.stages) for part in parts]
    order = send_order(ready_s, send_s, [part.layer for part in parts])
    sent = [parts[place] for place in order]
    behind = {part.layer: len(sent) - 1 - place for place, part in enumerate(sent)}
    pending: dict[int, int] = {}  # layers that have to wait, and the parts that may be left by then

    def begin(place: int) -> None:
        if place in pending:
            schedule.advance(rank)
            schedule.finish(rank, pending.pop(place))

    began_s = 0.0
    for _ in range(SETTLING_STEPS):
        began_s = rank.now_s
        both_passes(rank, layers, sent, schedule, micro_batches, begin)
        pending.update(behind)
        rank.now_s += besides_s
    return rank.now_s - began_s, tuple(
        replace(span, start_s=max(span.start_s, began_s) - began_s, end_s=span.end_s - began_s)
        for span in rank.spans
        if span.end_s > began_s
    )
