"""Predictions: a profile, a strategy and hardware become the time of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.exchange.grouping import group
from lab.measure.profile import VALUE_BYTES, Profile
from lab.measure.spans import Span
from lab.simulate.events import Beside, Compute, Exchange, Turns, run
from lab.simulate.exchanges import Stage, model_of, stages_of
from lab.simulate.hardware import Hardware
from lab.simulate.network import Network

NONE = {"_target_": "lab.exchange.none.NoExchange"}
SYNCS = ("NoSync", "GradSync", "LocalSync")


@dataclass(frozen=True)
class Strategy:
    """How gradients are exchanged.

    Attributes:
        exchange: `_target_` and its arguments, as configured.
        every: steps from one exchange to the next.
    """

    exchange: Mapping[str, Any]
    overlap: bool = False
    bucket_mb: float | None = None
    every: int = 1

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Strategy:
        """The strategy of a run's composed settings.

        Raises:
            ValueError: it is one that has no cost model.
        """
        sync = settings["sync"]["_target_"].rpartition(".")[2]
        name = f"strategy={settings['strategy']}"
        if sync not in SYNCS:
            raise ValueError(f"{name}: {sync} keeps its own schedule, which has no cost model")
        if settings["accumulate"] != 1:
            raise ValueError(f"accumulate={settings['accumulate']}: must be 1 for a prediction")
        model_of(settings["exchange"])
        return cls(
            exchange=settings["exchange"],
            overlap=settings["overlap"],
            bucket_mb=settings["bucket_mb"],
            every=settings["sync"].get("every", 1),
        )


CEILING = Strategy(NONE)


@dataclass(frozen=True)
class Step:
    """One optimizer step of every rank, of which rank 0 stands for all.

    Attributes:
        step_s: its time.
        spans: of rank 0: forward, backward, exchange and codec.
    """

    step_s: float
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Prediction:
    """A step, and what it amounts to.

    Attributes:
        exposed_s: what it takes longer than without any exchange, on as many ranks.
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
    batch: int,
    weak: bool = False,
) -> Prediction:
    """The step of a strategy on `world_size` ranks.

    Args:
        batch: of all ranks, among which it is divided; if `weak`, of each.

    Raises:
        ValueError: the hardware has fewer ranks.
    """
    own = batch if weak else batch // world_size
    step = simulate(profile, hardware, strategy, world_size, own)
    ceiling = simulate(profile, hardware, CEILING, world_size, own)
    alone = simulate(profile, hardware, CEILING, 1, batch)
    speedup = (world_size if weak else 1) * alone.step_s / step.step_s
    exposed_s = step.step_s - ceiling.step_s
    return Prediction(step, exposed_s, speedup, speedup / world_size)


def simulate(
    profile: Profile, hardware: Hardware, strategy: Strategy, world_size: int, batch: int
) -> Step:
    """One step on `world_size` ranks of `batch` images each. ValueError as in `predict`."""
    network = Network(hardware, world_size)
    layers = [
        Compute(layer.name, profile.forward_s(layer, batch), profile.backward_s(layer, batch))
        for layer in profile.layers
    ]
    in_turns = hardware.library == "gloo" and model_of(strategy.exchange).staged
    rank = run(
        layers,
        exchanges(profile, strategy, network),
        Turns() if in_turns and strategy.overlap else Beside(),
        strategy.overlap,
        hardware.contention,
    )
    overhead_s = hardware.overhead_s * hardware.host_factor(world_size)
    return Step(rank.now_s + overhead_s, tuple(rank.spans))


def exchanges(profile: Profile, strategy: Strategy, network: Network) -> list[Exchange]:
    """The buckets of a profile's gradients with what each costs; each layer is one parameter."""
    values = {f"{layer.name}.weight": profile.values(layer) for layer in profile.layers}
    place = {name: index for index, name in enumerate(values)}
    arriving = [(name, VALUE_BYTES * values[name]) for name in reversed(values) if values[name]]
    found = []
    for names in group(arriving, strategy.bucket_mb):
        label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        own = tuple(values[name] for name in names)
        stages = stages_of(own, strategy.exchange, network)
        shares = [Stage(stage.row, stage.seconds / strategy.every) for stage in stages]
        found.append(Exchange(label, min(place[name] for name in names), shares))
    return found
