"""Quantities that claims are about, each defined once for measured and for predicted figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol


class Missing(LookupError):
    """These facts do not tell."""


@dataclass(frozen=True)
class Point:
    """A cell of a study; batch_size is global. profile: instead of the paper's."""

    strategy: str = "none"
    world_size: int = 1
    batch_size: int = 256
    profile: str | None = None


class Facts(Protocol):
    """What a study has measured, or a model predicts. Methods raise Missing where they cannot."""

    def step_s(self, at: Point) -> float:
        """Seconds of a step."""
        ...

    def payload_bytes(self, at: Point) -> float:
        """What the busiest rank sends in a step."""
        ...

    def gradient_bytes(self) -> float:
        """Of the whole model as published, before any scaling of bytes or change of layers."""
        ...

    def fc_share(self) -> float:
        """Of its parameters, those in fully connected layers."""
        ...

    def conv2_operations(self, batch_size: int) -> float:
        """Multiplications and additions of its second convolution's forward pass."""
        ...


class MeasuredFacts(Facts, Protocol):
    """Facts of runs."""

    def repeats(self) -> Sequence[Facts]:
        """What each repeat tells by itself."""
        ...

    def emulations(self) -> list[str]:
        """In which ways these runs are not what they stand for."""
        ...

    def machines(self) -> list[str]:
        """On what they ran."""
        ...


def speedup(facts: Facts, at: Point) -> float:
    """Over one rank, which exchanges nothing, at the same global batch."""
    return facts.step_s(Point(batch_size=at.batch_size)) / facts.step_s(at)


def weak_speedup(facts: Facts, at: Point) -> float:
    """Images per second over those of one rank that exchanges nothing, with as many images each."""
    alone = replace(at, strategy="none", world_size=1, batch_size=at.batch_size // at.world_size)
    return at.world_size * facts.step_s(alone) / facts.step_s(at)


def gain(over: str, facts: Facts, at: Point) -> float:
    """The step time of the strategy `over` in units of this one's."""
    return facts.step_s(replace(at, strategy=over)) / facts.step_s(at)


def transfer_s(facts: Facts, at: Point) -> float:
    """Of all gradients from one rank to another: half of what the tree adds on two ranks."""
    pair = replace(at, strategy="tree", world_size=2)
    return (facts.step_s(pair) - facts.step_s(replace(pair, strategy="none"))) / 2


def transfers(facts: Facts, at: Point) -> float:
    """What a blocking strategy adds to a step, in units of one transfer of all gradients."""
    added = facts.step_s(at) - facts.step_s(replace(at, strategy="none"))
    return added / transfer_s(facts, at)


def byte_share(facts: Facts, at: Point) -> float:
    """Bytes on the wire in units of the all-reduce's."""
    reference = replace(at, strategy="allreduce", profile=None)
    return facts.payload_bytes(at) / facts.payload_bytes(reference)


QUANTITIES: dict[str, Callable[[Facts, Point], float]] = {
    "step_s": lambda facts, at: facts.step_s(at),
    "speedup": speedup,
    "weak_speedup": weak_speedup,
    "weak_efficiency": lambda facts, at: weak_speedup(facts, at) / at.world_size,
    "images_per_s": lambda facts, at: at.batch_size / facts.step_s(at),
    "gain_over_tree": partial(gain, "tree"),
    "gain_over_allreduce": partial(gain, "allreduce"),
    "transfer_s": transfer_s,
    "transfers": transfers,
    "byte_share": byte_share,
    "gradient_bytes": lambda facts, at: facts.gradient_bytes(),
    "fc_share": lambda facts, at: facts.fc_share(),
    "conv2_operations": lambda facts, at: facts.conv2_operations(at.batch_size),
}
