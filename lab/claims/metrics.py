"""Define each quantity that claims are about, once for measurements and predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from lab.model.facts import Convolution, Parameters
from lab.model.profile import VALUE_BYTES


class Missing(LookupError):
    """The facts at hand do not give a quantity."""


@dataclass(frozen=True)
class Point:
    """Where a quantity is taken: a cell of a study, and maybe another model or a layer.

    Attributes:
        batch_size: global.
        profile: takes the place of the paper's.
        layer: whose operations are counted.
    """

    strategy: str = "none"
    world_size: int = 1
    batch_size: int = 256
    profile: str | None = None
    layer: Convolution | None = None


class Facts(Protocol):
    """Facts that a study has measured or a model predicts. Methods raise Missing otherwise."""

    def step_s(self, at: Point) -> float:
        """Seconds of a step."""
        ...

    def payload_bytes(self, at: Point) -> float:
        """Bytes that the busiest rank sends in a step."""
        ...

    def parameters(self) -> Parameters:
        """Parameters of the model as published, before any scaling of bytes."""
        ...

    def operations(self, at: Point) -> float:
        """Multiplications and additions in the forward pass of the layer at `at`."""
        ...


class MeasuredFacts(Facts, Protocol):
    """Facts from runs."""

    def repeats(self) -> Sequence[Facts]:
        """The facts of each repeat alone."""
        ...

    def emulations(self) -> list[str]:
        """How the runs were emulated, sorted; empty if they were not."""
        ...

    def machines(self) -> list[str]:
        """The machines that the runs took place on, sorted."""
        ...


def speedup(facts: Facts, at: Point) -> float:
    """Compare with one rank, which exchanges nothing, at the same global batch."""
    return facts.step_s(Point(batch_size=at.batch_size)) / facts.step_s(at)


def weak_speedup(facts: Facts, at: Point) -> float:
    """Compare throughput with one rank that exchanges nothing, at the same per-rank batch."""
    alone = replace(at, strategy="none", world_size=1, batch_size=at.batch_size // at.world_size)
    return at.world_size * facts.step_s(alone) / facts.step_s(at)


def gain(over: str, facts: Facts, at: Point) -> float:
    """Divide the step time of the strategy `over` by this one's."""
    return facts.step_s(replace(at, strategy=over)) / facts.step_s(at)


def transfer_s(facts: Facts, at: Point) -> float:
    """Time of sending all gradients to another rank: half of what the tree adds on two ranks."""
    pair = replace(at, strategy="tree", world_size=2)
    return (facts.step_s(pair) - facts.step_s(replace(pair, strategy="none"))) / 2


def transfers(facts: Facts, at: Point) -> float:
    """Express what a blocking strategy adds to a step in transfers of all gradients."""
    added = facts.step_s(at) - facts.step_s(replace(at, strategy="none"))
    return added / transfer_s(facts, at)


def byte_share(facts: Facts, at: Point) -> float:
    """Divide the bytes on the wire by the all-reduce's."""
    reference = replace(at, strategy="allreduce", profile=None)
    return facts.payload_bytes(at) / facts.payload_bytes(reference)


def fc_share(facts: Facts, _at: Point) -> float:
    """Share of the parameters in fully connected layers.

    Raises:
        Missing: the kinds of layers are not known.
    """
    parameters = facts.parameters()
    if parameters.fully_connected is None:
        raise Missing
    return parameters.fully_connected / parameters.total


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
    "gradient_bytes": lambda facts, at: VALUE_BYTES * facts.parameters().total,
    "fc_share": fc_share,
    "operations": lambda facts, at: facts.operations(at),
}
