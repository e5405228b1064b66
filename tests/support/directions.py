"""Exchanges that leave directions, driven by gradients that tests make up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lab.codec.layout import FLOAT_BYTES, RowBytes
from lab.distributed.comm import Comm, run_ranks
from lab.exchange.bucket import GradBucket
from lab.exchange.signed_rows import RaggedBlocks

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Ledger:
    """One rank's view: directions [steps, values], payload and messages by step, the exchange."""

    directions: Tensor
    payload: list[int]
    messages: list[int]
    exchange: Any


def num_values(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def deliver(
    make: Callable[[], Any],
    shapes: Shapes,
    gradients: Tensor,
    states: list[dict[str, Any]] | None = None,
    first: int = 0,
    weights: nn.Module | None = None,
) -> list[Ledger]:
    """Exchange `gradients` [steps, ranks, values] in one bucket; return each rank's ledger.

    Args:
        states: of each rank, to go on from. first: number of the first step. weights: see setup.
    """
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}

    def rank_main(comm: Comm) -> Ledger:
        exchange, ledger = make(), Ledger(torch.empty(0), [], [], None)
        if weights is not None:
            exchange.setup(weights)
        if states:
            exchange.load_state_dict(states[comm.rank])
        directions = []
        for step, gradient in enumerate(gradients, start=first):
            before = comm.traffic.payload_bytes, comm.traffic.num_messages
            bucket = GradBucket(sizes, gradient[comm.rank].clone(), step)
            exchange.average(bucket, comm)
            assert bucket.finite is None or bool(bucket.finite) == bool(gradient.isfinite().all())
            directions.append(bucket.flat)
            ledger.payload.append(comm.traffic.payload_bytes - before[0])
            ledger.messages.append(comm.traffic.num_messages - before[1])
        ledger.directions, ledger.exchange = torch.stack(directions), exchange
        return ledger

    ledgers = run_ranks(gradients.shape[1], rank_main)
    one = ledgers[0].directions
    assert all(torch.equal(one, other.directions) or not one.isfinite().all() for other in ledgers)
    return ledgers


class Uncompressed(RaggedBlocks):
    """Stands for Blocks where a test looks at all of an exchange but its signs."""

    name = "none"  # no kernels

    def row_bytes(self, columns: int) -> RowBytes:
        return RowBytes(0, FLOAT_BYTES * columns)

    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        payload.view(torch.float32).copy_(values)

    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        return payload.view(torch.float32).clone()


def adam(
    gradients: Tensor,
    frozen_at: int,
    betas: tuple[float, float] = (0.9, 0.999),
    due: Callable[[int], bool] = lambda step: True,
) -> Tensor:
    """Return Adam's directions in float64 of mean gradients [steps, values], by the paper's text.

    Args:
        frozen_at: steps after which the variance stays as it is.
        due: whether a step up to then, from 1, updates the variance.
    """
    m, v = torch.zeros(2, gradients.shape[1], dtype=torch.float64)
    directions, settled, updates = [], v, 0
    for step, g in enumerate(gradients.double(), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        if step <= frozen_at and due(step):
            updates += 1
            v = betas[1] * v + (1 - betas[1]) * g**2
            settled = v / (1 - betas[1] ** updates)
        directions.append(m / (1 - betas[0] ** step) / (settled.sqrt() + 1e-8))
    return torch.stack(directions)


def of_like_sizes(steps: int, size: int, num: int) -> Tensor:
    """Return gradients [steps, size, num] whose mean is of no value far below its neighbours'."""
    share = torch.randn(steps, size, num)
    mean = (torch.rand(steps, 1, num) + 0.5) * torch.randn(steps, 1, num).sign()
    return share - share.mean(dim=1, keepdim=True) + mean
