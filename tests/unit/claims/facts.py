"""Invented facts for tests of claims."""

from __future__ import annotations

from lab.claims.metrics import ClaimPoint, Facts, Missing
from lab.model.work import Counts


class Table:
    """Facts with step times by (strategy, ranks), the same for any batch.

    Args:
        tree: multiplies the step times of `tree`.
    """

    STEP_MS = {("none", 1): 200, ("none", 2): 100, ("none", 4): 50, ("tree", 2): 190}
    STEP_MS |= {("tree", 4): 230, ("overlap", 4): 100}
    PAYLOAD = {"allreduce": 320.0, "onebit": 10.0}

    def __init__(self, tree: float = 1.0) -> None:
        self.factor = {"tree": tree}

    def step_s(self, at: ClaimPoint) -> float:
        try:
            milliseconds = self.STEP_MS[at.strategy, at.world_size]
            return self.factor.get(at.strategy, 1.0) * milliseconds / 1000
        except KeyError:
            raise Missing from None

    def payload_bytes(self, at: ClaimPoint) -> float:
        return self.PAYLOAD[at.strategy]

    def all_reduce_s(self, at: ClaimPoint) -> float:
        raise Missing

    def counts(self) -> Counts:
        return Counts(62_500_000, 59_375_000, {"conv2": 1000})

    def repeats(self) -> list[Facts]:
        return [Table(0.5), Table(2.0)]


class Repeated(Table):
    """The same with one repeat for each factor of `tree`."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = factors

    def repeats(self) -> list[Facts]:
        return [Table(factor) for factor in self.factors]
