"""1-bit SGD: error feedback against arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lab.codec import onebit
from lab.distributed.comm import Comm
from lab.distributed.thread_comm import run_ranks
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import OneBit
from tests.support.slow import some_of

SHAPES = {"fc": (10, 70), "bias": (10,), "conv": (3, 20, 5, 5), "small": (5, 4)}


@dataclass
class Ledger:
    """One rank's view over many steps, as flat vectors."""

    delivered: Tensor
    residual: Tensor
    exchange: OneBit


def exchange_steps(gradients: Tensor, **settings: object) -> list[Ledger]:
    """Exchange `gradients` [steps, ranks, values] over threads; return each rank's ledger."""
    steps, size, num_values = gradients.shape
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}

    def rank_main(comm: Comm) -> Ledger:
        exchange = OneBit(**settings)  # type: ignore[arg-type]
        delivered = torch.zeros(num_values, dtype=torch.float64)
        bucket = GradBucket(shapes, torch.empty(0))
        for step in range(steps):
            bucket = GradBucket(shapes, gradients[step, comm.rank].clone(), step)
            exchange.average(bucket, comm)
            delivered += size * bucket.flat.double()
        return Ledger(delivered, residual_of(exchange, bucket, comm), exchange)

    return run_ranks(size, rank_main)


def residual_of(exchange: OneBit, bucket: GradBucket, comm: Comm) -> Tensor:
    """Return both residuals of a rank, laid out like its bucket."""
    kept = GradBucket(bucket.shapes, torch.zeros(bucket.flat.numel(), dtype=torch.float64))
    exchange.add_residual(kept, comm)
    return kept.flat


def num_values() -> int:
    return sum(torch.Size(shape).numel() for shape in SHAPES.values())


@pytest.mark.parametrize("granularity", ["column", "block"])
@pytest.mark.parametrize("threshold", onebit.THRESHOLDS)
@pytest.mark.parametrize("size", some_of([1, 2, 3, 4, 8], every=2))
def test_delivered_and_residuals_make_the_true_sum(
    size: int, threshold: str, granularity: str
) -> None:
    gradients = torch.randn(50, size, num_values())
    ledgers = exchange_steps(gradients, threshold=threshold, granularity=granularity, block_size=64)
    assert all(torch.equal(ledger.delivered, ledgers[0].delivered) for ledger in ledgers)
    truth = gradients.double().sum(dim=(0, 1))
    kept = torch.stack([ledger.residual for ledger in ledgers]).sum(dim=0)
    assert (ledgers[0].delivered + kept - truth).norm() <= 1e-5 * truth.norm()
    assert kept.norm() > 0.01 * truth.norm()  # residuals make the sum right


def test_small_tensors_travel_exactly() -> None:
    gradients = torch.randn(1, 3, num_values())
    delivered = exchange_steps(gradients)[0].delivered
    mean = gradients[0].double().sum(dim=0)
    start = 700
    torch.testing.assert_close(delivered[start : start + 10], mean[start : start + 10])
    assert not torch.allclose(delivered[:start], mean[:start])


def test_warm_up_steps_are_exact_and_leave_no_residual() -> None:
    gradients = torch.randn(2, 2, num_values())
    ledger = exchange_steps(gradients[:1], warmup_steps=1, granularity="block", block_size=64)
    torch.testing.assert_close(ledger[0].delivered, gradients[0].double().sum(dim=0))
    assert not ledger[0].residual.any()


def test_without_error_feedback_nothing_is_kept() -> None:
    ledgers = exchange_steps_without_feedback()
    assert all(not exchange.state_dict() for exchange in ledgers)


def exchange_steps_without_feedback() -> list[OneBit]:
    def rank_main(comm: Comm) -> OneBit:
        exchange = OneBit(error_feedback=False)
        for step in range(3):
            exchange.average(GradBucket({"w": torch.Size((4, 64))}, torch.randn(256), step), comm)
        return exchange

    return run_ranks(2, rank_main)


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_a_gradient_that_is_not_finite_reaches_all(bad_rank: int) -> None:
    shapes = {"w": torch.Size((6, 64))}

    def rank_main(comm: Comm) -> tuple[bool, bool]:
        flat = torch.randn(384)
        if comm.rank == bad_rank:
            flat[100] = torch.nan
        bucket = GradBucket(shapes, flat)
        OneBit().average(bucket, comm)
        assert bucket.finite is not None
        return bool(bucket.finite), bool(bucket.flat.isfinite().all())

    assert run_ranks(3, rank_main) == [(False, False)] * 3


@pytest.mark.parametrize("settings", [{}, {"warmup_steps": 9}, {"min_columns": 1000}])
def test_what_travels_exactly_is_looked_at_too(settings: dict[str, int]) -> None:
    def rank_main(comm: Comm) -> bool:
        exchange = OneBit(**settings)  # type: ignore[arg-type]
        shapes = {"w": torch.Size((6, 64)), "bias": torch.Size((6,))}
        bucket = GradBucket(shapes, torch.randn(390), 1)
        if comm.rank == 1:
            bucket.flat[-1] = torch.inf
        exchange.average(bucket, comm)
        assert bucket.finite is not None
        return bool(bucket.finite)

    assert run_ranks(2, rank_main) == [False] * 2


@pytest.mark.parametrize("new_size", [1, 2, 3, 5])
def test_redistribution_keeps_the_sum_of_residuals(new_size: int) -> None:
    ledgers = exchange_steps(torch.randn(5, 4, num_values()))
    states = [ledger.exchange.state_dict() for ledger in ledgers]
    new = [OneBit().redistribute(states, rank, new_size) for rank in range(new_size)]
    for name in states[0]["residual"]:
        old_sum = torch.stack([s["residual"][name].double() for s in states]).sum(dim=0)
        old_sum += torch.cat([s["owner"][name] for s in states if name in s["owner"]])
        new_sum = torch.stack([s["residual"][name].double() for s in new]).sum(dim=0)
        assert (new_sum - old_sum).norm() <= 1e-6 * old_sum.norm()
