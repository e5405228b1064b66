"""Exchanges that ranks run as threads, and what each rank is delivered and keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lab.distributed.comm import Comm, run_ranks
from lab.exchange.bucket import GradBucket, Plans
from lab.exchange.compressed import Coded

# A matrix, vectors, kernels, and parameters with few values or none.
SHAPES = {
    name: torch.Size(shape)
    for name, shape in {
        **{"fc": (10, 70), "bias": (10,), "empty": (0, 3), "scalar": ()},
        **{"conv": (7, 20, 5, 5), "one": (1,), "small": (3, 3)},
    }.items()
}
NUM_VALUES = sum(shape.numel() for shape in SHAPES.values())
WHOLE, TWO = [[*SHAPES]], [["conv", "one"], ["small", "fc", "empty", "bias", "scalar"]]
Make = Callable[[], Any]
Buckets = Sequence[Sequence[str]]


@dataclass
class Ledger:
    """One rank's exchange, and what came of it.

    Attributes:
        means: what each step has delivered, laid out as SHAPES.
        finite: whether each step's gradients were found finite.
        plans: of buckets, by their parameters' names.
    """

    exchange: Any
    comm: Comm
    means: list[Tensor] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    plans: dict[str, Plans] = field(default_factory=dict)

    @property
    def delivered(self) -> Tensor:
        """The sum over steps and ranks of what was delivered: float64 [values]."""
        return self.comm.size * torch.stack(self.means).double().sum(dim=0)

    def kept(self) -> Tensor:
        """Return what this rank keeps: float64 [values]."""
        spans = {name: start for name, start, _ in GradBucket(SHAPES, torch.zeros(1)).spans()}
        out = torch.zeros(NUM_VALUES, dtype=torch.float64)
        for name, at, values in self.exchange.residuals(SHAPES, self.comm):
            out[spans[name] + at : spans[name] + at + values.numel()] += values.flatten()
        return out

    def run(self, gradients: Iterable[Tensor], *plans: Buckets, first: int = 0) -> None:
        """Exchange this rank's gradients [steps, values].

        Args:
            plans: buckets by name, of which the next ones hold from each later step on.
            first: number of the first step.
        """
        for step, gradient in enumerate(gradients, start=first):
            parts = dict(
                zip(SHAPES, gradient.split([*map(torch.Size.numel, SHAPES.values())]), strict=True)
            )
            means, finite = dict[str, Tensor](), True
            for names in (plans or (WHOLE,))[min(step - first, len(plans or (WHOLE,)) - 1)]:
                flat = torch.cat([parts[name] for name in names])
                shared = self.plans.setdefault(" ".join(names), Plans())
                bucket = GradBucket(
                    {name: SHAPES[name] for name in names}, flat, step, plans=shared
                )
                self.exchange.average(bucket, self.comm)
                shown = bool(bucket.flat.isfinite().all())
                assert bucket.finite is not None or not isinstance(self.exchange, Coded)
                told = shown if bucket.finite is None else bool(bucket.finite)
                assert shown or not told
                finite = finite and told
                means |= {name: bucket.flat[start:stop] for name, start, stop in bucket.spans()}
            self.means.append(torch.cat([means[name] for name in SHAPES]))
            self.finite.append(finite)


def exchanged(
    make: Make,
    gradients: Tensor,
    *plans: Buckets,
    nodes: list[list[int]] | None = None,
    states: Sequence[Mapping[str, Any]] = (),
    first: int = 0,
) -> list[Ledger]:
    """Exchange `gradients` [steps, ranks, values]; return each rank's ledger.

    Args:
        states: of any number of ranks, to go on from.
    """

    def rank_main(comm: Comm) -> Ledger:
        exchange = make()
        exchange.validate(comm)
        if len(states) == comm.size and exchange.continues(states[comm.rank]):
            exchange.load_state_dict(states[comm.rank])
        elif states:
            exchange.load_state_dict(exchange.redistribute(list(states), comm.rank, comm.size))
        ledger = Ledger(exchange, comm)
        ledger.run(gradients[:, comm.rank].clone(), *plans, first=first)
        return ledger

    ledgers = run_ranks(gradients.shape[1], rank_main, nodes)
    for ledger in ledgers:
        for one, other in zip(ledger.means, ledgers[0].means, strict=True):
            assert torch.equal(one, other) or not all(ledger.finite)
    return ledgers


def kept_by_all(ledgers: Iterable[Ledger]) -> Tensor:
    """Return the sum over ranks of what they keep."""
    return torch.stack([ledger.kept() for ledger in ledgers]).sum(dim=0)


def assert_nothing_is_lost(
    ledgers: Sequence[Ledger], truth: Tensor, before: Tensor | float = 0.0
) -> None:
    """Hold delivered + kept to true sums, of which residuals are a part.

    Args:
        before: what earlier ledgers were delivered.
    """
    kept = kept_by_all(ledgers)
    assert (before + ledgers[0].delivered + kept - truth).norm() <= 1e-5 * truth.norm()
    assert kept.norm() > 1e-4 * truth.norm()  # or a lost residual would not show


def states_of(ledgers: Iterable[Ledger]) -> list[dict[str, Any]]:
    """Return copies of all ranks' states."""
    return [
        {
            kind: {n: v.clone() for n, v in kept.items()}
            for kind, kept in ledger.exchange.state_dict().items()
        }
        for ledger in ledgers
    ]
