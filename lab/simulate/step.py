"""Predict the time of a step from a profile, a strategy and hardware."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lab.exchange.grouping import cut, group
from lab.measure.spans import Span
from lab.model.profile import VALUE_BYTES, Profile, shapes
from lab.simulate.costs import card_of, stages_of
from lab.simulate.events import Beside, Compute, Exchange, Rank, Turns, run
from lab.simulate.hardware import Hardware
from lab.simulate.load import Shape, Stage
from lab.simulate.network import Network
from lab.simulate.steady import steady
from lab.sync.pattern import Begin, Leg, Pattern, class_of, gradsync, pattern_of

UPDATE_PASSES = 5  # SGD with momentum reads weight, gradient and momentum, and writes two of them
NONE = {"_target_": "lab.exchange.none.NoExchange"}


@dataclass(frozen=True)
class Strategy:
    """A way to exchange gradients.

    Attributes:
        exchange: `_target_` and its arguments, as configured.
        pattern: the pattern of the strategy's sync.
        accumulate: micro-batches of a step; gradients are exchanged in the last one.
        chunk_mb: size of buckets, and of parts of large parameters, where the next forward waits.
        tries: the run times steps in which it does not wait as well, and keeps the faster schedule.
    """

    exchange: Mapping[str, Any]
    bucket_mb: float | None = None
    pattern: Pattern = gradsync(overlap=False)
    accumulate: int = 1
    chunk_mb: float | None = None
    tries: bool = False

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
        card_of(settings["exchange"])
        strategy = cls(settings["exchange"], settings["bucket_mb"], pattern, settings["accumulate"])
        if not pattern.waits_in_forward:
            return strategy
        sync = settings["sync"]
        return replace(strategy, chunk_mb=sync["chunk_mb"], tries=sync["trials"] > 0)

    @property
    def lossy(self) -> bool:
        """True if ranks do not take every step with the mean of their gradients."""
        late = self.pattern.begins is Begin.NEXT_STEP
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
    """Simulate one step on `world_size` ranks. ValueError as in `predict`."""
    if strategy.pattern.waits_in_forward and strategy.tries:
        ways = replace(strategy, tries=False), replace(strategy, pattern=gradsync(overlap=True))
        steps = [simulate(profile, hardware, w, world_size, per_rank_batch_size) for w in ways]
        return min(steps, key=lambda step: step.step_s)
    network = Network(hardware, world_size)
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
    in_turns = hardware.library == "gloo" and card_of(strategy.exchange).staged
    planned = exchanges(profile, strategy, network)
    schedule = Turns() if in_turns and strategy.pattern.overlaps else Beside()
    terms = hardware.contention, hardware.burst_s
    besides_s = _besides_s(profile, hardware, network, per_rank_batch_size)
    input_s = _input_s(hardware, network, per_rank_batch_size)
    if strategy.pattern.waits_in_forward:
        passes_s, spans = steady(
            layers, planned, schedule, Rank(*terms), besides_s, strategy.accumulate
        )
        return Step(max(passes_s, input_s), _payload_bytes(planned), spans)
    rank = run(layers, planned, schedule, *terms, micro_batches=strategy.accumulate)
    # After the root's update, weights go back the way that gradients came.
    back = planned if Leg.WEIGHTS_FROM_ROOT in strategy.pattern.legs else []
    for exchange in back:
        schedule.submit(exchange, rank)
    schedule.finish(rank)
    step_s = max(rank.now_s + besides_s, input_s)
    return Step(step_s, _payload_bytes([*planned, *back]), tuple(rank.spans))


def _payload_bytes(exchanges: list[Exchange]) -> float:
    return sum(stage.payload_bytes for each in exchanges for stage in each.stages)


def _besides_s(
    profile: Profile, hardware: Hardware, network: Network, per_rank_batch_size: int
) -> float:
    """Return the time of a step besides forward, backward and exchange.

    A profile that has it includes the update; `overhead_s` comes on top.
    """
    rest_s = profile.rest_s(per_rank_batch_size)
    if rest_s is None:
        updated = UPDATE_PASSES * profile.gradient_bytes
        rest_s = updated / hardware.update_bytes_per_s if hardware.update_bytes_per_s else 0.0
    rest_s *= hardware.host_factor(network.size)
    return hardware.overhead_s + rest_s + hardware.overhead_s_per_rank * (network.local - 1)


def _input_s(hardware: Hardware, network: Network, per_rank_batch_size: int) -> float:
    """Return the time in which a node prepares the samples of a step, while it trains."""
    if not hardware.input_samples_per_s:
        return 0.0
    return network.local * per_rank_batch_size / hardware.input_samples_per_s


def exchanges(profile: Profile, strategy: Strategy, network: Network) -> list[Exchange]:
    """Plan the buckets of a profile's gradients, each with the stages of its exchange."""
    places = {layer.name: place for place, layer in enumerate(profile.layers)}
    parts = len(strategy.pattern.legs) * strategy.pattern.every
    planned = []
    for bucket in _messages(profile, strategy):
        first, *others = bucket
        label = f"{first} and {len(others)} more" if others else first
        ready = min(places[name.partition("[")[0].rpartition(".")[0]] for name in bucket)
        stages = stages_of(list(bucket.values()), strategy.exchange, network)
        begins = _begins(strategy.pattern.begins, ready, len(places))
        planned.append(Exchange(label, begins, [_share(stage, parts) for stage in stages]))
    return planned


def buckets(profile: Profile, bucket_mb: float | None) -> list[dict[str, Shape]]:
    """Divide a profile's parameters among buckets: the shapes of each one's, by name."""
    parameters = {
        f"{layer.name}.{kind}": shape
        for layer in profile.layers
        for kind, shape in shapes(profile.values(layer)).items()
    }
    arriving = [(name, VALUE_BYTES * math.prod(parameters[name])) for name in reversed(parameters)]
    planned = group(arriving, bucket_mb, profile.bytes_scale)
    return [{name: parameters[name] for name in names} for names in planned]


def _messages(profile: Profile, strategy: Strategy) -> list[dict[str, Shape]]:
    """Divide a profile's parameters among what travels at once: buckets, or also parts of them."""
    if not strategy.pattern.waits_in_forward:
        return buckets(profile, strategy.bucket_mb)
    planned = buckets(profile, strategy.chunk_mb)
    if not card_of(strategy.exchange).sums:
        return planned
    messages: list[dict[str, Shape]] = []
    for bucket in planned:
        if len(bucket) > 1:
            messages.append(bucket)
            continue
        ((name, shape),) = bucket.items()
        parts = cut(math.prod(shape), strategy.chunk_mb, profile.bytes_scale)
        several = len(parts) > 1
        messages += [
            {f"{name}[{part.start}:{part.stop}]": (len(part),) if several else shape}
            for part in parts
        ]
    return messages


def _begins(begin: Begin, ready: int, num_layers: int) -> int:
    """Return the layer whose gradient starts an exchange; `ready` completes its bucket."""
    if begin is Begin.DURING_BACKWARD:
        return ready
    return num_layers if begin is Begin.NEXT_STEP else 0  # layer 0 is the last to have a gradient


def _share(stage: Stage, parts: int) -> Stage:
    """Return one of `parts` equal parts of a stage: the share of one step or one leg."""
    return Stage(stage.row, stage.seconds / parts, stage.payload_bytes / parts)
