"""Predict a step from a profile, a strategy and hardware, and where strategies cross over.

A crossover is the batch, or the rate of the links, at which one strategy overtakes another.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lab.exchange.cost import Shape
from lab.measure.spans import Span
from lab.model.profile import Profile
from lab.simulate.costs import (
    Load,
    Stage,
    class_of,
    exchange_of,
    phases_of,
    scatter_of,
    stages_of,
    ways_of,
)
from lab.simulate.events import (
    Beside,
    Compute,
    Exchange,
    Rank,
    Schedule,
    Sharded,
    Turns,
    both_passes,
    costs_of_units,
)
from lab.simulate.hardware import Hardware, Link
from lab.simulate.network import Network
from lab.simulate.strategy import (
    CEILING,
    EXACT,
    Bucket,
    Strategy,
    messages_of_fragments,
    parameter_of,
    ranks_of_a_copy,
)
from lab.sync.pattern import Begin, Leg, Pattern, gradsync, send_order

UPDATE_PASSES = 5  # SGD with momentum reads weight, gradient and momentum, and writes two of them
# Of PrioritySync: the second begins with an exchange under way; two more for it to settle.
SETTLING_STEPS = 4


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
    def of(cls, step_s: float, stages: Iterable[Stage], spans: Iterable[Span]) -> Step:
        """Add up what the stages of a step send."""
        sent = [(stage.payload_bytes, stage.across_bytes) for stage in stages]
        payload_bytes, across_bytes = map(sum, zip(*sent, strict=True)) if sent else (0.0, 0.0)
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
        ValueError: the hardware has too few ranks.
    """
    per_rank_batch_size = batch_size // world_size
    step = simulate(profile, hardware, strategy, world_size, per_rank_batch_size)
    no_exchange = replace(CEILING, accumulate=strategy.accumulate)
    ceiling = simulate(profile, hardware, no_exchange, world_size, per_rank_batch_size)
    alone = simulate(profile, hardware, no_exchange, 1, per_rank_batch_size if weak else batch_size)
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
    network = Network(hardware, world_size)
    if strategy.pattern.gathers_units:
        return _sharded_step(profile, network, strategy, per_rank_batch_size)
    ways = [_mean_step(profile, network, way, per_rank_batch_size) for way in _tried(strategy)]
    return min(ways, key=lambda step: step.step_s)


def _tried(strategy: Strategy) -> list[Strategy]:
    """List the ways that a run times whole steps of, to keep the fastest."""
    if strategy.pattern.waits_in_forward and strategy.tries:
        return [replace(strategy, tries=False), replace(strategy, pattern=gradsync(overlap=True))]
    if class_of(strategy.exchange) == "Auto":  # for each bucket its own, or one for all
        alike = ways_of(strategy.exchange).values()
        return [strategy, *(replace(strategy, exchange=way) for way in alike)]
    return [strategy]


def _mean_step(
    profile: Profile, network: Network, strategy: Strategy, per_rank_batch_size: int
) -> Step:
    kinds = [
        (of_run * share, _step(profile, network, strategy, planned, per_rank_batch_size))
        for of_run, exchange in phases_of(strategy.exchange)
        for share, planned in kinds_of_steps(profile, replace(strategy, exchange=exchange), network)
    ]
    step_s = sum(share * step.step_s for share, step in kinds)
    payload_bytes = sum(share * step.payload_bytes for share, step in kinds)
    across_bytes = sum(share * step.across_bytes for share, step in kinds)
    return Step(step_s, payload_bytes, across_bytes, kinds[0][1].spans)


def _step(
    profile: Profile,
    network: Network,
    strategy: Strategy,
    planned: Sequence[Exchange],
    per_rank_batch_size: int,
) -> Step:
    """Simulate one step with the exchanges that run in it."""
    hardware = network.hardware
    layers = _layers(profile, network, per_rank_batch_size // strategy.accumulate)
    in_turns = hardware.library == "gloo" and exchange_of(strategy.exchange).staged
    schedule = Turns() if in_turns and strategy.pattern.overlaps else Beside()
    rank = Rank(hardware.contention, hardware.burst_s)
    besides_s = _besides_s(profile, network, per_rank_batch_size, strategy.pattern)
    input_s = _input_s(network, per_rank_batch_size)
    if strategy.pattern.waits_in_forward:
        passes_s, spans = steady(layers, planned, schedule, rank, besides_s, strategy.accumulate)
        return Step.of(max(passes_s, input_s), _stages(planned), spans)
    both_passes(rank, layers, planned, schedule, strategy.accumulate)
    schedule.finish(rank)
    back = _of_weights(profile, strategy, network, planned)
    for exchange in back:
        schedule.submit(exchange, rank)
    schedule.finish(rank)
    step_s = max(rank.now_s + besides_s, input_s)
    return Step.of(step_s, _stages([*planned, *back]), rank.spans)


def _sharded_step(
    profile: Profile, network: Network, strategy: Strategy, per_rank_batch_size: int
) -> Step:
    """Simulate one step of FSDP2, which gathers weights and scatters gradients on its own."""
    hardware = network.hardware
    layers = _layers(profile, network, per_rank_batch_size // strategy.accumulate)
    rank = Rank(hardware.contention, hardware.burst_s)
    units = costs_of_units(profile, strategy, network)
    sharded = Sharded(layers, units, rank, blocks=hardware.library == "gloo")
    sharded.run(strategy.accumulate)
    besides_s = _besides_s(profile, network, per_rank_batch_size, strategy.pattern)
    step_s = max(rank.now_s + besides_s, _input_s(network, per_rank_batch_size))
    return Step.of(step_s, sharded.stages(strategy.accumulate), rank.spans)


def _layers(profile: Profile, network: Network, micro_batch_size: int) -> list[Compute]:
    """Return the layers' times on the slowest rank."""
    shared = network.hardware.compute_factor(network.size, profile.num_threads)
    slowest = network.slowest_factor * shared
    return [
        Compute(
            layer.name,
            slowest * profile.forward_s(layer, micro_batch_size),
            slowest * profile.backward_s(layer, micro_batch_size),
        )
        for layer in profile.layers
    ]


def _stages(exchanges: Iterable[Exchange]) -> list[Stage]:
    return [stage for each in exchanges for stage in each.stages]


def _of_weights(
    profile: Profile, strategy: Strategy, network: Network, planned: Sequence[Exchange]
) -> Sequence[Exchange]:
    """Return the exchanges of weights after the update."""
    if Leg.WEIGHTS_FROM_ROOT in strategy.pattern.legs:  # the way that gradients came
        return planned
    if Leg.PARTS_OF_WEIGHTS in strategy.pattern.legs:  # in full, whatever type gradients had
        (buckets,) = messages_of_fragments(profile, strategy, network.hardware.on_gpu)
        return exchanges(profile, replace(strategy, exchange=EXACT), network, buckets)
    return []


def _besides_s(
    profile: Profile, network: Network, per_rank_batch_size: int, pattern: Pattern
) -> float:
    """Return the time of a step besides forward, backward and exchange.

    A profile that has it includes the update, of all weights even if each rank updates its part
    alone; `overhead_s` comes on top.
    """
    hardware, rest_s = network.hardware, profile.rest_s(per_rank_batch_size)
    if rest_s is None:
        sharers = ranks_of_a_copy(pattern, network) if pattern.parts_the_update else 1
        updated = UPDATE_PASSES * profile.gradient_bytes / sharers
        rest_s = updated / hardware.update_bytes_per_s if hardware.update_bytes_per_s else 0.0
    rest_s *= hardware.host_factor(network.size)
    return hardware.overhead_s + rest_s + hardware.overhead_s_per_rank * (network.local - 1)


def _input_s(network: Network, per_rank_batch_size: int) -> float:
    """Return the time in which a node prepares the samples of a step, while it trains."""
    rate = network.hardware.input_samples_per_s
    return network.local * per_rank_batch_size / rate if rate else 0.0


def stages_of_step(profile: Profile, strategy: Strategy, network: Network) -> list[Stage]:
    """List the different stages of a strategy's steps."""
    if strategy.pattern.gathers_units:
        units = costs_of_units(profile, strategy, network)
        return [stage for unit in units for stage in (*unit.gather, *unit.again, *unit.scatter)]
    kinds = kinds_of_steps(profile, strategy, network)
    return [stage for _, planned in kinds for stage in _stages(planned)]


def kinds_of_steps(
    profile: Profile, strategy: Strategy, network: Network
) -> list[tuple[float, list[Exchange]]]:
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
) -> list[Exchange]:
    """Return the exchange of each bucket: its stages in one step."""
    places = {layer.name: place for place, layer in enumerate(profile.layers)}
    pattern = strategy.pattern
    steps = pattern.delay if pattern.begins is Begin.NEXT_STEPS else pattern.every
    share = pattern.num_exchanges / (max(1, len(pattern.legs)) * steps)
    found = []
    for bucket in planned:
        first, *others = bucket
        label = f"{first} and {len(others)} more" if others else first
        ready = min(places[parameter_of(name).rpartition(".")[0]] for name in bucket)
        shapes = list(bucket.values())
        if Leg.PARTS_OF_GRADIENTS in pattern.legs and not exchange_of(strategy.exchange).exact:
            stages = _scattered(shapes, strategy, network)
        else:
            stages = [s.scaled(share) for s in stages_of(shapes, strategy.exchange, network)]
        found.append(Exchange(label, _begins(pattern, ready, len(places)), stages))
    return found


def _scattered(shapes: list[Shape], strategy: Strategy, network: Network) -> list[Stage]:
    """Return the stages of an exchange's first half, of parts that are filled up alike."""
    num_values = sum(map(math.prod, shapes))
    part = -(-num_values // network.size)
    load = Load([(part * network.size,)], class_of(strategy.exchange), network)
    scatter_of(strategy.exchange)(load)
    return load.stages


def _begins(pattern: Pattern, ready: int, num_layers: int) -> int:
    """Return the layer whose gradient starts an exchange; `ready` completes its bucket."""
    if pattern.begins is Begin.DURING_BACKWARD:
        return ready
    return num_layers if pattern.outlasts_step else 0  # layer 0 is the last to have a gradient


def steady(
    layers: Sequence[Compute],
    parts: Sequence[Exchange],
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
        micro_batches: see lab.simulate.events.both_passes.

    Returns:
        Seconds of the last step, and its spans, from its beginning.
    """
    sent = _in_order(layers, parts)
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


def _in_order(layers: Sequence[Compute], parts: Sequence[Exchange]) -> list[Exchange]:
    """Plan the order of sending as training does: from times of backward, and of parts alone."""
    ready_s = [sum(layer.backward_s for layer in layers[part.layer :]) for part in parts]
    send_s = [sum(stage.seconds for stage in part.stages) for part in parts]
    return [parts[place] for place in send_order(ready_s, send_s, [part.layer for part in parts])]


LARGEST_BATCH = 2**20
RATES = (1e5, 1e13)  # bytes per second: the range that is searched
CLOSE = 1.001  # factor to which the rate is determined
MARGIN = 1.05  # factor; strategies within it count as equally fast


def crossover_batch(
    profile: Profile, hardware: Hardware, strategy: Strategy, world_size: int
) -> int | None:
    """Find the smallest global batch that `world_size` ranks train faster than one rank does.

    Only multiples of `world_size` are tried; None if none up to LARGEST_BATCH is faster. If a
    batch pays, every larger one is assumed to pay.
    """

    def pays(per_rank: int) -> bool:
        alone = simulate(profile, hardware, CEILING, 1, per_rank * world_size)
        return simulate(profile, hardware, strategy, world_size, per_rank).step_s < alone.step_s

    largest = LARGEST_BATCH // world_size
    if not pays(largest):
        return None
    return world_size * (1 + bisect_left(range(1, largest), True, key=pays))


def crossover_rate(
    profile: Profile,
    hardware: Hardware,
    strategies: tuple[Strategy, Strategy],
    world_size: int,
    batch_size: int,
) -> float | None:
    """Find the link rate in bytes per second below which the first strategy is MARGIN faster.

    Args:
        strategies: the first is meant for slow links, such as one that compresses.
        batch_size: global.

    Returns:
        None if the first is faster at both ends of RATES, or at neither.
    """

    def pays(rate: float) -> bool:
        links = with_rate(hardware, rate)
        per_rank = batch_size // world_size
        one, other = (simulate(profile, links, each, world_size, per_rank) for each in strategies)
        return MARGIN * one.step_s < other.step_s

    low, high = RATES
    if not pays(low) or pays(high):
        return None
    while high / low > CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high


def with_rate(hardware: Hardware, rate: float) -> Hardware:
    """Return the hardware with another rate of its slowest links (see `slowest`).

    Args:
        rate: bytes per second.
    """
    kind = "inter" if hardware.inter else "intra"
    return replace(hardware, **{kind: replace(slowest(hardware), bandwidth_bytes_per_s=rate)})


def slowest(hardware: Hardware) -> Link:
    """Return the slowest kind of links: those between nodes if there are any."""
    link = hardware.inter or hardware.intra
    assert link is not None  # hardware of more than one rank has links
    return link
