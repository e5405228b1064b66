"""Compressing exchanges: delivered values and residuals, against arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.distributed.thread_comm import run_ranks
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import Int4, Int8, SignSGD, TopK
from lab.exchange.powersgd import PowerSGD
from lab.exchange.rails import Place
from lab.exchange.randomk import RandomK
from tests.support.cases import COMPRESSES_LITTLE, COMPRESSING, maker
from tests.support.slow import some_of

SHAPES = {
    name: torch.Size(shape)
    for name, shape in {
        **{"fc": (10, 70), "bias": (10,), "empty": (0, 3)},
        **{"conv": (7, 20, 5, 5), "one": (1,), "small": (3, 3)},
    }.items()
}
NUM_VALUES = sum(shape.numel() for shape in SHAPES.values())
SIZES = [1, 2, 3, 4, 8]
Make = Callable[[], Any]
_ALONE = Place(None, 0, 1)
WITH_FEEDBACK = [exchange for exchange in COMPRESSING if maker(exchange)().keeps_residuals]


def compressor(exchange: str, **arguments: Any) -> Make:
    """Makes an exchange that compresses SHAPES. Arguments are of its class."""
    return maker(exchange, *COMPRESSES_LITTLE.get(exchange, ()), **arguments)


@dataclass
class Ledger:
    """One rank's view: the last mean, the sum of all delivered, and its residuals."""

    mean: Tensor
    finite: bool
    delivered: Tensor
    exchange: Any

    def residual(self) -> Tensor:
        """Return the residual, laid out like the bucket."""
        bucket = GradBucket(SHAPES, torch.zeros(NUM_VALUES, dtype=torch.float64))
        self.exchange.add_residual(bucket, _ALONE)
        return bucket.flat


def exchange_steps(gradients: Tensor, make: Make) -> list[Ledger]:
    """Exchange `gradients` [steps, ranks, values] over threads; return each rank's ledger."""

    def rank_main(comm: Comm) -> Ledger:
        exchange = make()
        delivered = torch.zeros(NUM_VALUES, dtype=torch.float64)
        bucket = GradBucket(SHAPES, torch.empty(0))
        for step, of_ranks in enumerate(gradients):
            bucket = GradBucket(SHAPES, of_ranks[comm.rank].clone(), step)
            exchange.average(bucket, comm)
            delivered += comm.size * bucket.flat.double()
        finite = bool(bucket.flat.isfinite().all()) and (bucket.finite is None or bucket.finite)
        return Ledger(bucket.flat, bool(finite), delivered, exchange)

    return run_ranks(gradients.shape[1], rank_main)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_delivered_and_residuals_make_the_true_sum(name: str, size: int) -> None:
    gradients = torch.randn(30, size, NUM_VALUES)
    ledgers = exchange_steps(gradients, compressor(name))
    assert all(torch.equal(ledger.delivered, ledgers[0].delivered) for ledger in ledgers)
    truth = gradients.double().sum(dim=(0, 1))
    kept = torch.stack([ledger.residual() for ledger in ledgers]).sum(dim=0)
    assert (ledgers[0].delivered + kept - truth).norm() <= 1e-5 * truth.norm()
    assert kept.norm() > 0.01 * truth.norm()  # residuals make the sum right


@pytest.mark.parametrize("size", SIZES)
def test_int8_is_off_by_half_a_level_at_each_stage(size: int) -> None:
    gradients = torch.randn(1, size, NUM_VALUES) * torch.logspace(-3, 3, NUM_VALUES)
    ledgers = exchange_steps(gradients, compressor("int8"))
    assert all(torch.equal(ledger.mean, ledgers[0].mean) for ledger in ledgers)
    mean = gradients[0].mean(dim=0)
    first = torch.stack([half_a_level(of_rank) for of_rank in gradients[0]]).mean(dim=0)
    # The second stage's range is that of means, which the first stage has shifted a little.
    bound = 1.01 * (first + half_a_level(mean) + first / 255)
    assert ((ledgers[0].mean - mean).abs() <= bound).all()
    assert ((ledgers[0].mean - mean).abs() > 0.1 * bound).any()


def half_a_level(values: Tensor) -> Tensor:
    """Return half a level of each value's block of 64."""
    blocks = values.split(64)
    return torch.cat([(b.max() - b.min()).expand(len(b)) / 510 for b in blocks])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_fp16_rounds_each_gradient_and_each_sum(size: int) -> None:
    gradients = torch.randn(1, size, NUM_VALUES)
    ledgers = exchange_steps(gradients, compressor("fp16"))
    assert all(torch.equal(ledger.mean, ledgers[0].mean) for ledger in ledgers)
    # Half a unit in the last of 11 places, of each gradient's share and of each partial sum.
    bound = size * gradients[0].abs().sum(dim=0) / size * 2**-11 + 1e-6
    off = (ledgers[0].mean - gradients[0].mean(dim=0)).abs()
    assert (off <= bound).all()
    assert off.max() > 1e-5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", some_of([1, 3], every=2))
@pytest.mark.parametrize("name", COMPRESSING)
def test_a_gradient_that_is_not_finite_reaches_all(name: str, size: int, bad: float) -> None:
    for place in (5, 705, 2000):  # in a matrix, in a bias, in kernels
        gradients = torch.randn(2, size, NUM_VALUES)
        gradients[1, -1, place] = bad
        assert not any(ledger.finite for ledger in exchange_steps(gradients, compressor(name)))
        assert all(ledger.finite for ledger in exchange_steps(gradients[:1], compressor(name)))


def test_what_fp16_cannot_hold_is_not_finite() -> None:
    gradients = torch.full((1, 2, NUM_VALUES), 60000.0)
    assert all(ledger.finite for ledger in exchange_steps(gradients, compressor("fp16")))
    gradients *= 1.2
    assert not any(ledger.finite for ledger in exchange_steps(gradients, compressor("fp16")))


@pytest.mark.parametrize("name", COMPRESSING)
def test_zeros_stay_zeros_and_do_no_harm(name: str) -> None:
    gradients = torch.zeros(3, 2, NUM_VALUES)
    assert not any(ledger.delivered.any() for ledger in exchange_steps(gradients, compressor(name)))
    later = torch.cat([gradients, torch.randn(1, 2, NUM_VALUES)])
    assert all(ledger.mean[:700].any() for ledger in exchange_steps(later, compressor(name)))


@pytest.mark.parametrize("name", COMPRESSING)
@pytest.mark.parametrize("num_values", [0, 1])
def test_a_bucket_of_one_value_or_none(name: str, num_values: int) -> None:
    make = compressor(name)

    def rank_main(comm: Comm) -> Tensor:
        flat = torch.full((num_values,), 1.5 + comm.rank)
        make().average(GradBucket({"w": flat.shape}, flat), comm)
        return flat

    expected = torch.full((num_values,), 2.5)
    assert all(torch.equal(flat, expected) for flat in run_ranks(3, rank_main))


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_without_error_feedback_nothing_is_kept(name: str) -> None:
    gradients = torch.randn(2, 2, NUM_VALUES)
    (first, _) = exchange_steps(gradients[:1], compressor(name))
    without = exchange_steps(gradients, compressor(name, error_feedback=False))
    assert not any(ledger.residual().any() for ledger in without)
    at_first = exchange_steps(gradients[:1], compressor(name, error_feedback=False))
    torch.testing.assert_close(at_first[0].mean, first.mean)  # there is no residual yet


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_a_residual_is_flushed_once(name: str) -> None:
    def rank_main(comm: Comm) -> None:
        exchange = compressor(name)()
        exchange.average(GradBucket(SHAPES, torch.randn(NUM_VALUES)), comm)
        residual = Ledger(torch.empty(0), True, torch.empty(0), exchange).residual()
        bucket = GradBucket(SHAPES, torch.ones(NUM_VALUES), 1)
        exchange.flush_residual(bucket, comm)
        torch.testing.assert_close(bucket.flat.double(), residual + 1)
        left = Ledger(torch.empty(0), True, torch.empty(0), exchange).residual()
        assert not left.any()

    run_ranks(2, rank_main)


def test_topk_delivers_the_largest_and_keeps_the_others() -> None:
    shapes = {"w": torch.Size((4,)), "v": torch.Size((4,))}

    def rank_main(comm: Comm) -> tuple[list[float], dict[str, list[float]]]:
        exchange = TopK(ratio=0.25)
        own = [[1.0, -8, 2, 0, 4, 3, 2, 1], [6.0, 1, 1, 1, 2, 2, 8, 2]][comm.rank]
        bucket = GradBucket(shapes, torch.tensor(own))
        exchange.average(bucket, comm)
        return bucket.flat.tolist(), {
            n: r.tolist() for n, r in exchange.state_dict()["residual"].items()
        }

    (mean, kept), (other_mean, other_kept) = run_ranks(2, rank_main)
    assert mean == other_mean == [3, -4, 0, 0, 2, 0, 4, 0]
    assert kept == {"w": [1, 0, 2, 0], "v": [0, 3, 2, 1]}
    assert other_kept == {"w": [0, 1, 1, 1], "v": [2, 2, 0, 2]}


def test_randomk_draws_anew_by_seed_step_and_name() -> None:
    def drawn(seed: int, step: int, name: str) -> list[int]:
        """Return the places at which values arrive, of a gradient of ones."""
        bucket = GradBucket({name: torch.Size((1000,))}, torch.ones(1000), step)
        run_ranks(1, lambda comm: RandomK(ratio=0.03, seed=seed).average(bucket, comm))
        return bucket.flat.nonzero().flatten().tolist()

    first = drawn(0, 0, "w")
    assert first == drawn(0, 0, "w")
    assert len(first) == 30
    assert all(first != other for other in (drawn(1, 0, "w"), drawn(0, 1, "w"), drawn(0, 0, "v")))


def test_powersgd_delivers_a_matrix_of_low_rank_exactly() -> None:
    shapes = {"w": torch.Size((30, 4, 10))}
    low_rank = torch.randn(30, 2) @ torch.randn(2, 40)

    def rank_main(comm: Comm) -> tuple[Tensor, Tensor]:
        exchange = PowerSGD(rank=2)
        bucket = GradBucket(shapes, low_rank.flatten() * (1 + comm.rank))
        exchange.average(bucket, comm)
        return bucket.flat, exchange.state_dict()["residual"]["w"]

    for mean, kept in run_ranks(3, rank_main):
        torch.testing.assert_close(mean, 2 * low_rank.flatten(), rtol=1e-4, atol=1e-4)
        assert kept.norm() < 1e-5 * mean.norm()


def test_powersgd_finds_the_largest_directions_from_its_warm_start() -> None:
    matrix = torch.randn(30, 40)
    shapes = {"w": matrix.shape}
    u, s, v = torch.linalg.svd(matrix)
    best = (u[:, :2] * s[:2]) @ v[:2]

    def rank_main(comm: Comm) -> Tensor:
        exchange = PowerSGD(rank=2, error_feedback=False)
        bucket = GradBucket(shapes, matrix.flatten().clone())
        for _ in range(200):
            bucket = GradBucket(shapes, matrix.flatten().clone())
            exchange.average(bucket, comm)
        return bucket.flat.view_as(matrix)

    (found,) = run_ranks(1, rank_main)
    assert (found - matrix).norm() < 1.001 * (best - matrix).norm()


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@pytest.mark.parametrize("new_size", [1, 3, 8])
def test_redistribution_keeps_the_sum_of_residuals(name: str, new_size: int) -> None:
    ledgers = exchange_steps(torch.randn(3, 4, NUM_VALUES), compressor(name))
    states = [ledger.exchange.state_dict() for ledger in ledgers]
    total = torch.stack([ledger.residual() for ledger in ledgers]).sum(dim=0)
    news = [compressor(name)() for _ in range(new_size)]
    for rank, new in enumerate(news):
        new.load_state_dict(new.redistribute(states, rank, new_size))
        for kind in states[0].keys() - {"residual", "owner", "owner_start"}:  # equal on all ranks
            for parameter, value in states[0][kind].items():
                assert torch.equal(new.state_dict()[kind][parameter], value)
    ledgers = [Ledger(total, True, total, new) for new in news]
    after = torch.stack([ledger.residual() for ledger in ledgers]).sum(dim=0)
    assert (after - total).norm() <= 1e-6 * total.norm()


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_a_loaded_state_goes_on_in_the_same_bits(name: str) -> None:
    gradients, make = torch.randn(4, NUM_VALUES), compressor(name)

    def rank_main(comm: Comm) -> list[Tensor]:
        whole, resumed = make(), make()
        results = []
        for step, gradient in enumerate(gradients * (1 + comm.rank)):
            if step == 2:
                resumed.load_state_dict(whole.state_dict())
            for exchange in (whole, resumed) if step >= 2 else (whole,):
                bucket = GradBucket(SHAPES, gradient.clone(), step)
                exchange.average(bucket, comm)
                results.append(bucket.flat)
        return results

    _, _, third, third_again, fourth, fourth_again = run_ranks(2, rank_main)[0]
    assert torch.equal(third, third_again)
    assert torch.equal(fourth, fourth_again)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8(block_size=10), r"exchange.block_size=10: must be a multiple of 4"),
        (lambda: Int4(block_size=12), r"exchange.block_size=12: must be a multiple of 8 above"),
        (lambda: SignSGD(min_values=0), r"exchange.min_values=0: must be an integer"),
        (lambda: TopK(ratio=0), r"exchange.ratio=0: must be a number above 0 and at most 1"),
        (lambda: RandomK(ratio=1.5), r"exchange.ratio=1.5: must be a number above 0 and at most 1"),
        (lambda: RandomK(seed="a"), r"exchange.seed=a: must be an integer"),  # type: ignore[arg-type]
        (lambda: PowerSGD(rank=0), r"exchange.rank=0: must be an integer of at least 1"),
        (lambda: TopK(error_feedback=1), r"exchange.error_feedback=1: must be true or false"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_name_the_setting(make: Make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
