"""Exchanges that take turns with backward: the worker's rules, and what a faster link changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lab.claims.predicted import profile_of
from lab.distributed.comm import Collective
from lab.distributed.worker import TurnsWorker
from lab.model.profile import Profile
from lab.settings.files import read_file
from lab.simulate.hardware import Hardware, parse, with_value
from lab.simulate.step import BucketExchange, LayerCompute, OneThread, Stage, simulate
from lab.simulate.strategy import Strategy
from lab.simulate.terms import learned
from tests.support.cases import ALL_STRATEGIES, LIBRARIES
from tests.support.simulated import run, strategy

pytestmark = pytest.mark.xdist_group("simulate")  # shares strategies, whose composing takes longest
# Libraries keep a schedule of their own, fc1x1 changes the model, and zeropp needs full nodes.
LEFT_OUT = {"none", "zeropp", "fc1x1", "fc1x1_onebit", *LIBRARIES}
SIMULATED = [name for name in ALL_STRATEGIES if name not in LEFT_OUT]
RATES = [10 ** (7 + each / 8) for each in range(25)]  # bytes per second, to 10 GB/s
MOST = 0.15  # of a step, by which one with codecs between backward's layers may be longer


@dataclass
class Clock:
    """A time that passes only as it is told, and a link that carries one collective at a time."""

    now_s: float = 0.0
    free_s: float = 0.0


@dataclass
class Sent:
    """A collective on the clock's link."""

    clock: Clock
    end_s: float

    def is_completed(self) -> bool:
        return self.clock.now_s >= self.end_s

    def wait(self) -> None:
        self.clock.now_s = max(self.clock.now_s, self.end_s)


def collectives(clock: Clock, stages: list[Stage]) -> Iterator[Collective]:
    """Do what a staged exchange does: its own work, and in between collectives."""
    for stage in stages:
        if stage.row == "codec":
            clock.now_s += stage.seconds
        else:
            clock.free_s = max(clock.free_s, clock.now_s) + stage.seconds
            yield Sent(clock, clock.free_s)


def on_worker(layers: list[LayerCompute], exchanges: list[list[Stage]]) -> float:
    """Return when backward and all exchanges, one of each layer, end in the real worker's order."""
    clock, worker = Clock(), TurnsWorker()
    clock.now_s += sum(layer.forward_s for layer in layers)
    for layer, stages in zip(reversed(layers), exchanges, strict=True):
        clock.now_s += layer.backward_s
        worker.advance()
        worker.submit(layer.name, lambda stages=stages: collectives(clock, stages))
    worker.wait()
    return clock.now_s


@pytest.mark.parametrize("seed", range(20))
def test_turns_are_those_of_the_worker(seed: int) -> None:
    chance = random.Random(seed)
    layers = [LayerCompute(str(place), 1.0, chance.uniform(0.1, 1.0)) for place in range(8)]

    def some_stages() -> list[Stage]:
        rows = chance.choice((["exchange"], [*3 * ["codec", "exchange"], "codec"]))
        return [Stage(row, chance.uniform(0.1, 2.0)) for row in rows]

    stages = [some_stages() for _ in layers]
    planned = [BucketExchange(str(7 - at), 7 - at, each) for at, each in enumerate(stages)]
    simulated = run(layers, planned, OneThread(), contention=0.0)
    assert simulated.now_s == pytest.approx(on_worker(layers, stages))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of("alexnet_titanx", 0.02)


def longer_on_faster(profile: Profile, machines: list[Hardware], chosen: Strategy) -> float:
    """Return by how much a step is longer than one on any slower link, at most, as a share."""
    steps = [simulate(profile, each, chosen, 16, 2).step_s for each in machines]
    least = [min(steps[: at + 1]) for at in range(len(steps))]
    return max(step / low - 1 for step, low in zip(steps, least, strict=True))


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("file", ["h100x8_ndr", "emulated_1gbit"])
def test_a_faster_link_makes_no_step_longer(name: str, file: str, profile: Profile) -> None:
    machine, chosen = learned(parse(read_file("hardware", file))), strategy(name)
    in_turns = machine.library == "gloo" and chosen.pattern.overlaps
    for way in ("intra", "inter"):
        key = f"{way}.bandwidth_bytes_per_s"
        machines = [with_value(machine, key, rate) for rate in RATES]
        most = MOST if in_turns and chosen.lossy else 1e-9
        assert longer_on_faster(profile, machines, chosen) <= most
