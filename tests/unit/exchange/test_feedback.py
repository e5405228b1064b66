"""Compressing exchanges, and codecs on both paths: what they deliver, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codec.codecs import THRESHOLDS
from lab.distributed.comm import Comm, run_ranks
from lab.exchange.allreduce import AllReduce
from lab.exchange.auto import Auto
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import AllGather, OneBit, TopK, TwoStage
from lab.exchange.memory import Memory
from lab.exchange.powersgd import PowerSGD
from lab.exchange.randomk import RandomK
from lab.exchange.schedule import Schedule
from tests.support.cases import COMPRESSES_LITTLE, COMPRESSING, maker
from tests.support.exact import CODECS
from tests.support.ledger import (
    NUM_VALUES,
    SHAPES,
    TWO,
    WHOLE,
    Ledger,
    Make,
    assert_nothing_is_lost,
    exchanged,
    kept_by_all,
    states_of,
)
from tests.support.slow import some_of

SIZES = [1, 2, 3, 4, 8]
# Over the paths that no exchange of COMPRESSING has; of the first three, over one.
OTHER_PATHS: list[tuple[str, type[TwoStage | AllGather]]] = [
    *((name, TwoStage) for name in ("bfloat16", "int8", "signs", "topk")),
    *((name, AllGather) for name in ("float8", "onebit", "int4")),
]


def compressor(exchange: str, **arguments: Any) -> Make:
    """Makes an exchange that compresses SHAPES. Arguments are of its class."""
    return maker(exchange, *COMPRESSES_LITTLE.get(exchange, ()), **arguments)


def one_bit(threshold: str, granularity: str, error_feedback: bool = True) -> OneBit:
    settings: dict[str, Any] = {"threshold": threshold, "granularity": granularity}
    settings |= {"block_size": 64} if granularity == "block" else {}
    return OneBit(**settings, error_feedback=error_feedback)


# Each makes an exchange that keeps what it leaves out, or with False one that does not.
FEEDBACK: dict[str, Callable[[bool], Any]] = {
    **{
        name: lambda keeps, name=name: compressor(name, error_feedback=keeps)()
        for name in COMPRESSING
        if maker(name)().keeps_residuals
    },
    **{
        f"onebit {t} {g}": lambda keeps, t=t, g=g: one_bit(t, g, keeps)
        for t in THRESHOLDS
        for g in ("column", "block")
    },
    **{
        f"{codec} by {path.__name__}": lambda keeps, c=codec, p=path: p(CODECS[c], Memory(keeps))
        for codec, path in OTHER_PATHS
    },
}
# What was kept must go on at a switch, or be given up.
BETWEEN = {"exact": AllReduce, "trials": lambda: Auto({"topk": TopK(0.1)}, ["topk"], 1, 0.0)}
for _name, _second in BETWEEN.items():
    FEEDBACK[f"a schedule, {_name} between"] = lambda keeps, second=_second: Schedule(
        one_bit("zero", "column", keeps), second(), PowerSGD(1, error_feedback=keeps), until=(2, 4)
    )
# Hydra composes in one thread alone.
for _name in [name for name in FEEDBACK if name in COMPRESSING]:
    _both = {keeps: compressor(_name, error_feedback=keeps) for keeps in (True, False)}
    FEEDBACK[_name] = lambda keeps, both=_both: both[keeps]()


def keeping(name: str) -> Make:
    return lambda: FEEDBACK[name](True)


@pytest.mark.parametrize("size", some_of(SIZES, every=2))
@pytest.mark.parametrize("name", FEEDBACK)
def test_delivered_and_residuals_make_the_true_sum_though_buckets_change(
    name: str, size: int
) -> None:
    gradients = torch.randn(12, size, NUM_VALUES)
    ledgers = exchanged(keeping(name), gradients, *4 * [WHOLE], *4 * [TWO], WHOLE)
    assert_nothing_is_lost(ledgers, gradients.double().sum(dim=(0, 1)))
    assert all(all(ledger.finite) for ledger in ledgers)


def test_an_exact_phase_delivers_what_one_before_it_kept() -> None:
    gradients = torch.randn(2, 3, NUM_VALUES)
    ledgers = exchanged(
        lambda: Schedule(one_bit("zero", "column"), AllReduce(), None, (1,)), gradients
    )
    truth = gradients.double().sum(dim=(0, 1))
    assert (ledgers[0].delivered - truth).norm() <= 1e-5 * truth.norm()
    assert not kept_by_all(ledgers).any()


@pytest.mark.parametrize("size", [1, 3])
def test_int8_is_off_by_half_a_level_at_each_stage(size: int) -> None:
    gradients = torch.randn(1, size, NUM_VALUES) * torch.logspace(-3, 3, NUM_VALUES)
    (found,) = exchanged(compressor("int8"), gradients)[0].means
    mean = gradients[0].mean(dim=0)
    first = torch.stack([half_a_level(of_rank) for of_rank in gradients[0]]).mean(dim=0)
    # The second stage's range is that of means, which the first stage has shifted a little.
    bound = 1.01 * (first + half_a_level(mean) + first / 255)
    assert ((found - mean).abs() <= bound).all()
    assert ((found - mean).abs() > 0.1 * bound).any()


def half_a_level(values: Tensor) -> Tensor:
    """Return half a level of each value's block of 64."""
    blocks = values.split(64)
    return torch.cat([(b.max() - b.min()).expand(len(b)) / 510 for b in blocks])


def test_fp16_rounds_each_gradient_and_each_sum() -> None:
    size = 3
    gradients = torch.randn(1, size, NUM_VALUES)
    (found,) = exchanged(compressor("fp16"), gradients)[0].means
    # Half a unit in the last of 11 places, of each gradient's share and of each partial sum.
    bound = size * gradients[0].abs().sum(dim=0) / size * 2**-11 + 1e-6
    off = (found - gradients[0].mean(dim=0)).abs()
    assert (off <= bound).all()
    assert off.max() > 1e-5


EVERY: dict[str, Make] = {
    **{name: compressor(name) for name in COMPRESSING},
    **{name: keeping(name) for name in FEEDBACK if name not in COMPRESSING},
}


@pytest.mark.parametrize("size", some_of([1, 3], also=[3]))
@pytest.mark.parametrize("name", EVERY)
def test_a_gradient_that_is_not_finite_reaches_all(name: str, size: int) -> None:
    # In a matrix, in a bias, in kernels.
    for place, bad in product((5, 705, 2000), (torch.nan, torch.inf)):
        gradients = torch.randn(2, size, NUM_VALUES)
        gradients[1, -1, place] = bad
        for ledger in exchanged(EVERY[name], gradients):
            assert ledger.finite == [True, False]


@pytest.mark.parametrize("settings", [{}, {"warmup_steps": 9}, {"min_columns": 1000}])
def test_what_travels_exactly_is_looked_at_too(settings: dict[str, Any]) -> None:
    gradients = torch.randn(1, 2, NUM_VALUES)
    gradients[0, 1, 705] = torch.inf
    assert not any(ledger.finite[0] for ledger in exchanged(lambda: OneBit(**settings), gradients))


def test_warm_up_steps_are_exact_and_leave_no_residual() -> None:
    gradients = torch.randn(1, 2, NUM_VALUES)
    ledgers = exchanged(lambda: OneBit(warmup_steps=1), gradients)
    torch.testing.assert_close(ledgers[0].means[0], gradients[0].mean(dim=0))
    assert not kept_by_all(ledgers).any()


def test_what_fp16_cannot_hold_is_not_finite() -> None:
    gradients = torch.full((1, 2, NUM_VALUES), 60000.0)
    assert exchanged(compressor("fp16"), gradients)[0].finite == [True]
    assert exchanged(compressor("fp16"), 1.2 * gradients)[0].finite == [False]


@pytest.mark.parametrize("name", EVERY)
def test_zeros_stay_zeros_and_do_no_harm(name: str) -> None:
    gradients = torch.cat([torch.zeros(3, 2, NUM_VALUES), torch.randn(1, 2, NUM_VALUES)])
    *zeros, last = exchanged(EVERY[name], gradients)[0].means
    assert not torch.stack(zeros).any() and last[:700].any()


@pytest.mark.parametrize("name", EVERY)
def test_a_bucket_of_one_value_or_none(name: str) -> None:
    def rank_main(comm: Comm) -> Tensor:
        flats = torch.empty(0), torch.full((1,), 1.5 + comm.rank)
        for flat in flats:
            EVERY[name]().average(GradBucket({"w": flat.shape}, flat), comm)
        return torch.cat(flats)

    for flat in run_ranks(3, rank_main):
        torch.testing.assert_close(flat, torch.full((1,), 2.5))


@pytest.mark.parametrize("name", FEEDBACK)
def test_without_error_feedback_nothing_is_kept(name: str) -> None:
    gradients = torch.randn(2, 2, NUM_VALUES)
    without, with_feedback = (
        exchanged(lambda keeps=keeps: FEEDBACK[name](keeps), gradients) for keeps in (False, True)
    )
    assert not any(ledger.kept().any() for ledger in without)
    # There is no residual yet.
    torch.testing.assert_close(without[0].means[0], with_feedback[0].means[0])


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_residual_is_flushed_once(name: str) -> None:
    def rank_main(comm: Comm) -> None:
        ledger, gradients = Ledger(keeping(name)(), comm), torch.randn(2, NUM_VALUES)
        ledger.run(gradients[:1])
        kept, bucket = ledger.kept(), GradBucket(SHAPES, torch.ones(NUM_VALUES), 1)
        ledger.exchange.flush_residual(bucket, comm)
        torch.testing.assert_close(bucket.flat.double(), kept + 1, rtol=1e-5, atol=1e-5)
        assert kept.any() and not ledger.kept().any()
        ledger.run(gradients[1:], first=2)  # another's residual does not come back
        off = ledger.means[-1].double() * comm.size + ledger.kept() - gradients[1].double()
        assert off.norm() <= 1e-5 * gradients[1].norm()

    run_ranks(1, rank_main)


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
    u, s, v = torch.linalg.svd(matrix)
    best = (u[:, :2] * s[:2]) @ v[:2]

    def rank_main(comm: Comm) -> Tensor:
        exchange, bucket = PowerSGD(rank=2, error_feedback=False), None
        for _ in range(200):
            bucket = GradBucket({"w": matrix.shape}, matrix.flatten().clone())
            exchange.average(bucket, comm)
        assert bucket
        return bucket.flat.view_as(matrix)

    (found,) = run_ranks(1, rank_main)
    assert (found - matrix).norm() < 1.001 * (best - matrix).norm()


@pytest.mark.parametrize("name", FEEDBACK)
def test_other_ranks_share_what_was_kept(name: str) -> None:
    ledgers = exchanged(keeping(name), torch.randn(3, 4, NUM_VALUES), TWO)
    states, total = states_of(ledgers), kept_by_all(ledgers)
    shared = {"residual", "owner", "owner_start"}
    equal = [kind for kind in states[0] if kind.rpartition(".")[2] not in shared]
    for new_size in (1, 3, 5):
        new = keeping(name)()
        new.load_state_dict(new.redistribute(states, new_size - 1, new_size))
        for kind in equal:  # on all ranks
            for parameter, value in states[0][kind].items():
                assert torch.equal(new.state_dict()[kind][parameter], value)
        none = torch.zeros(1, new_size, NUM_VALUES)  # of which all that arrives was kept
        went_on = exchanged(keeping(name), none, states=states, first=5)
        assert (went_on[0].delivered + kept_by_all(went_on) - total).norm() <= 1e-5 * total.norm()


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_loaded_state_goes_on_in_the_same_bits(name: str) -> None:
    gradients = torch.randn(5, 3, NUM_VALUES)
    whole = exchanged(keeping(name), gradients, TWO)
    states = states_of(exchanged(keeping(name), gradients[:2], TWO))
    resumed = exchanged(keeping(name), gradients[2:], TWO, states=states, first=2)
    assert all(map(torch.equal, whole[0].means[2:], resumed[0].means))
    assert all(
        torch.equal(one.kept(), other.kept()) for one, other in zip(whole, resumed, strict=True)
    )


def test_residuals_of_an_earlier_version_are_refused_in_a_line() -> None:
    old = {"residual": {"w": torch.ones(4, 64)}, "stripe_residual": {"w": torch.ones(2, 64)}}
    with pytest.raises(ValueError, match="an earlier version of the lab wrote these residuals"):
        TwoStage(CODECS["onebit"], Memory()).load_state_dict(old)
