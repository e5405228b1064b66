"""Predict the time of a step from a profile, a strategy and hardware."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.exchange.grouping import group
from lab.measure.spans import Span
from lab.model.profile import VALUE_BYTES, Profile, shapes
from lab.simulate.costs import card_of, is_staged, stages_of
from lab.simulate.events import Beside, Compute, Exchange, Turns, run
from lab.simulate.hardware import Hardware
from lab.simulate.load import Shape
from lab.simulate.network import Network
from lab.simulate.phases import in_shares, phases_of
from lab.sync.fragments import fragments
from lab.sync.pattern import Begin, Leg, Pattern, class_of, gradsync, pattern_of

Bucket = dict[str, Shape]  # shapes of parameters by name

UPDATE_PASSES = 5  # SGD with momentum reads weight, gradient and momentum, and writes two of them
NONE = {"_target_": "lab.exchange.none.NoExchange"}
EXACT = {"_target_": "lab.exchange.allreduce.AllReduce", "dtype": "float32"}


@dataclass(frozen=True)
class Strategy:
    """A way to exchange gradients.

    Attributes:
        exchange: `_target_` and its arguments, as configured.
        pattern: the pattern of the strategy's sync.
        accumulate: micro-batches of a step; gradients are exchanged in the last one.
    """

    exchange: Mapping[str, Any]
    bucket_mb: float | None = None
    pattern: Pattern = gradsync(overlap=False)
    accumulate: int = 1

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Strategy:
        """Read the strategy from a run's composed settings.

        Raises:
            ValueError: the strategy has no cost model.
        """
        pattern = pattern_of(settings)
        name = f"strategy={settings['strategy']}"
        if pattern.by_library:
            sync = class_of(settings)
            raise ValueError(f"{name}: {sync} keeps its own schedule, which has no cost model")
        if settings["transform"]:
            raise ValueError(f"{name}: changes the model: give the profile of that, transform=none")
        exchange = in_shares(settings["exchange"], settings["steps"])
        for _, way in phases_of(exchange):
            card_of(way)
        return cls(exchange, settings["bucket_mb"], pattern, settings["accumulate"])

    @property
    def lossy(self) -> bool:
        """True if ranks do not take every step with the mean of their gradients."""
        late = self.pattern.outlasts_step
        return late or self.pattern.own_replicas or card_of(self.exchange).lossy(self.exchange)


CEILING = Strategy(NONE)


@dataclass(frozen=True)
class Step:
    """One optimizer step of the slowest rank, which stands for all.

    Attributes:
        step_s: duration in seconds.
        payload_bytes: bytes that the busiest rank sends.
        spans: forward, backward, exchange and codec.
    """

    step_s: float
    payload_bytes: float
    spans: tuple[Span, ...]


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
    kinds = [
        (of_run * share, _step(profile, network, strategy, planned, per_rank_batch_size))
        for of_run, exchange in phases_of(strategy.exchange)
        for share, planned in kinds_of_steps(profile, replace(strategy, exchange=exchange), network)
    ]
    step_s = sum(share * step.step_s for share, step in kinds)
    payload_bytes = sum(share * step.payload_bytes for share, step in kinds)
    return Step(step_s, payload_bytes, kinds[0][1].spans)


def _step(
    profile: Profile,
    network: Network,
    strategy: Strategy,
    planned: Sequence[Exchange],
    per_rank_batch_size: int,
) -> Step:
    """Simulate one step with the exchanges that run in it."""
    hardware, world_size = network.hardware, network.size
    slowest = network.slowest_factor
    micro_batch_size = per_rank_batch_size // strategy.accumulate
    slowest *= hardware.compute_factor(world_size, profile.num_threads)
    layers = [
        Compute(
            layer.name,
            slowest * profile.forward_s(layer, micro_batch_size),
            slowest * profile.backward_s(layer, micro_batch_size),
        )
        for layer in profile.layers
    ]
    in_turns = hardware.library == "gloo" and is_staged(strategy.exchange)
    schedule = Turns() if in_turns and strategy.pattern.overlaps else Beside()
    terms = hardware.contention, hardware.burst_s
    rank = run(layers, planned, schedule, *terms, micro_batches=strategy.accumulate)
    back = _of_weights(profile, strategy, network, planned)
    for exchange in back:
        schedule.submit(exchange, rank)
    schedule.finish(rank)
    payload_bytes = sum(stage.payload_bytes for each in [*planned, *back] for stage in each.stages)
    step_s = max(
        rank.now_s + _besides_s(profile, hardware, network, per_rank_batch_size, strategy.pattern),
        _input_s(hardware, network, per_rank_batch_size),
    )
    return Step(step_s, payload_bytes, tuple(rank.spans))


def _of_weights(
    profile: Profile, strategy: Strategy, network: Network, planned: Sequence[Exchange]
) -> Sequence[Exchange]:
    """Return the exchanges of weights after the update."""
    if Leg.WEIGHTS_FROM_ROOT in strategy.pattern.legs:  # the way that gradients came
        return planned
    if Leg.PARTS_OF_WEIGHTS in strategy.pattern.legs:  # in full, whatever type gradients had
        (buckets,) = buckets_of_fragments(profile, strategy)
        return exchanges(profile, replace(strategy, exchange=EXACT), network, buckets)
    return []


def _besides_s(
    profile: Profile,
    hardware: Hardware,
    network: Network,
    per_rank_batch_size: int,
    pattern: Pattern,
) -> float:
    """Return the time of a step besides forward, backward and exchange.

    A profile that has it includes the update, of all weights even if each rank updates its part
    alone; `overhead_s` comes on top.
    """
    rest_s = profile.rest_s(per_rank_batch_size)
    if rest_s is None:
        sharers = network.size if Leg.PARTS_OF_WEIGHTS in pattern.legs else 1
        updated = UPDATE_PASSES * profile.gradient_bytes / sharers
        rest_s = updated / hardware.update_bytes_per_s if hardware.update_bytes_per_s else 0.0
    rest_s *= hardware.host_factor(network.size)
    return hardware.overhead_s + rest_s + hardware.overhead_s_per_rank * (network.local - 1)


def _input_s(hardware: Hardware, network: Network, per_rank_batch_size: int) -> float:
    """Return the time in which a node prepares the samples of a step, while it trains."""
    if not hardware.input_samples_per_s:
        return 0.0
    return network.local * per_rank_batch_size / hardware.input_samples_per_s


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
        for part in buckets_of_fragments(profile, strategy)
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
        ready = min(places[name.rpartition(".")[0]] for name in bucket)
        stages = stages_of(list(bucket.values()), strategy.exchange, network)
        begins = _begins(pattern, ready, len(places))
        found.append(Exchange(label, begins, [stage.scaled(share) for stage in stages]))
    return found


def buckets_of_fragments(profile: Profile, strategy: Strategy) -> list[list[Bucket]]:
    """Divide a profile's parameters among fragments, and each of these among buckets.

    Raises:
        ValueError: the profile has fewer layers than the strategy has fragments.
    """
    pattern = strategy.pattern
    sizes = [(name, VALUE_BYTES * math.prod(shape)) for name, shape in _parameters(profile).items()]
    if pattern.fragments == 1:
        return [buckets(profile, strategy.bucket_mb)]
    parts = fragments(sizes, pattern.fragments, pattern.fragment_order)
    return [buckets(profile, strategy.bucket_mb, names) for names in parts]


def buckets(
    profile: Profile, bucket_mb: float | None, only: Container[str] | None = None
) -> list[Bucket]:
    """Divide a profile's parameters, or `only` some, among buckets: shapes of each, by name."""
    parameters = _parameters(profile)
    arriving = [
        (name, VALUE_BYTES * math.prod(parameters[name]))
        for name in reversed(parameters)
        if only is None or name in only
    ]
    planned = group(arriving, bucket_mb, profile.bytes_scale)
    return [{name: parameters[name] for name in names} for names in planned]


def _parameters(profile: Profile) -> Bucket:
    return {
        f"{layer.name}.{kind}": shape
        for layer in profile.layers
        for kind, shape in shapes(profile.values(layer)).items()
    }


def _begins(pattern: Pattern, ready: int, num_layers: int) -> int:
    """Return the layer whose gradient starts an exchange; `ready` completes its bucket."""
    if pattern.begins is Begin.DURING_BACKWARD:
        return ready
    return num_layers if pattern.outlasts_step else 0  # layer 0 is the last to have a gradient
