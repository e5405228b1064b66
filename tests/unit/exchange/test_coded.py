"""Any codec of rows over both paths, with and without memory: nothing is lost or comes twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.casts import Cast, Float8
from lab.codec.levels import Int4, Int8
from lab.codec.onebit import OneBit
from lab.codec.signs import Signs
from lab.codec.topk import TopK
from lab.distributed.comm import Comm
from lab.distributed.thread_comm import run_ranks
from lab.exchange.bucket import GradBucket, Plans
from lab.exchange.coded import AllGather, Coded, TwoStage
from lab.exchange.memory import Memory

SHAPES = {
    name: torch.Size(shape)
    for name, shape in {
        **{"fc": (10, 70), "bias": (10,), "none": (0, 3)},
        **{"conv": (7, 20, 5, 5), "one": (1,), "small": (3, 3)},
    }.items()
}
NUM_VALUES = sum(shape.numel() for shape in SHAPES.values())
CODECS: dict[str, Callable[[], Codec]] = {
    "onebit": OneBit,
    "onebit blocks": lambda: OneBit(granularity="block", block_size=64),
    "int8": lambda: Int8(64),
    "int4": lambda: Int4(16),
    "bfloat16": lambda: Cast("bfloat16"),
    "float8": lambda: Float8(32),
    "signs": lambda: Signs(100),
    "topk": lambda: TopK(0.05),
}
PATHS = [TwoStage, AllGather]


def in_buckets(
    flat: Tensor, buckets: list[list[str]]
) -> list[tuple[dict[str, torch.Size], Tensor]]:
    """Divide a vector of all parameters into buckets, each with its shapes."""
    values = dict(zip(SHAPES, flat.split([s.numel() for s in SHAPES.values()]), strict=True))
    return [
        ({name: SHAPES[name] for name in names}, torch.cat([values[name] for name in names]))
        for names in buckets
    ]


class Rank:
    """One rank's exchange, and all that it has been delivered."""

    def __init__(self, exchange: Coded, comm: Comm) -> None:
        self.exchange, self.comm = exchange, comm
        self.delivered = torch.zeros(NUM_VALUES, dtype=torch.float64)
        self.plans = defaultdict[str, Plans](Plans)

    def step(self, gradient: Tensor, step: int, buckets: list[list[str]]) -> None:
        starts = {name: start for name, start, _ in GradBucket(SHAPES, gradient).spans()}
        for shapes, flat in in_buckets(gradient, buckets):
            plans = self.plans[" ".join(shapes)]
            bucket = GradBucket(shapes, flat, step, plans=plans)
            self.exchange.average(bucket, self.comm)
            assert bucket.finite
            for name, start, stop in bucket.spans():
                at = starts[name]
                mean = bucket.flat[start:stop].double()
                self.delivered[at : at + stop - start] += self.comm.size * mean

    def kept(self) -> Tensor:
        bucket = GradBucket(SHAPES, torch.zeros(NUM_VALUES, dtype=torch.float64))
        self.exchange.add_residual(bucket, self.comm)
        return bucket.flat


def run(
    make: Callable[[], Coded], gradients: Tensor, *plans: list[list[str]]
) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
    """Exchange in buckets that change after half of the steps; return delivered, kept and state."""

    def rank_main(comm: Comm) -> tuple[Tensor, Tensor, dict[str, Any]]:
        rank = Rank(make(), comm)
        for step, of_ranks in enumerate(gradients):
            now = plans[min(len(plans) - 1, 2 * step // len(gradients))]
            rank.step(of_ranks[comm.rank], step, now)
        return rank.delivered, rank.kept(), rank.exchange.state_dict()

    return run_ranks(gradients.shape[1], rank_main)


ONE, TWO = [[*SHAPES]], [["conv", "one"], ["small", "fc", "none", "bias"]]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CODECS)
def test_delivered_and_kept_make_the_true_sum_though_buckets_change(
    name: str, path: type[Coded], size: int
) -> None:
    gradients = torch.randn(6, size, NUM_VALUES)
    found = run(lambda: path(CODECS[name](), Memory()), gradients, ONE, TWO)
    delivered, kept, _ = zip(*found, strict=True)
    assert all(torch.equal(one, delivered[0]) for one in delivered)
    truth = gradients.double().sum(dim=(0, 1))
    total = torch.stack(kept).sum(dim=0)
    assert (delivered[0] + total - truth).norm() <= 1e-6 * truth.norm()
    assert total.any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CODECS)
def test_without_memory_nothing_is_kept(name: str, path: type[Coded]) -> None:
    found = run(
        lambda: path(CODECS[name](), Memory(keeps=False)), torch.randn(2, 2, NUM_VALUES), TWO
    )
    assert all(not kept.any() and not state for _, kept, state in found)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["onebit", "int4", "topk"])
def test_a_loaded_state_goes_on_in_the_same_bits(name: str, path: type[Coded]) -> None:
    gradients = torch.randn(5, 3, NUM_VALUES)

    def rank_main(comm: Comm) -> None:
        whole, resumed = (Rank(path(CODECS[name](), Memory()), comm) for _ in range(2))
        for step, of_ranks in enumerate(gradients):
            if step == 2:
                resumed.exchange.load_state_dict(whole.exchange.snapshot())
                resumed.delivered.copy_(whole.delivered)
            whole.step(of_ranks[comm.rank], step, TWO)
            if step >= 2:
                resumed.step(of_ranks[comm.rank], step, TWO)
        assert torch.equal(whole.delivered, resumed.delivered)
        assert torch.equal(whole.kept(), resumed.kept())

    run_ranks(3, rank_main)


@pytest.mark.parametrize("new_size", [1, 2, 5])
def test_other_ranks_share_what_was_kept(new_size: int) -> None:
    found = run(lambda: TwoStage(Int4(16), Memory()), torch.randn(4, 3, NUM_VALUES), TWO)
    _, kept, states = zip(*found, strict=True)

    def rank_main(comm: Comm) -> Tensor:
        rank = Rank(TwoStage(Int4(16), Memory()), comm)
        state = rank.exchange.redistribute(list(states), comm.rank, comm.size)
        rank.exchange.load_state_dict(state)
        before = rank.kept()
        rank.step(torch.zeros(NUM_VALUES), 5, ONE)
        total = before.clone()
        comm.all_reduce(total)
        after = rank.kept()
        comm.all_reduce(after)
        assert (rank.delivered + after - total).norm() <= 1e-5 * total.norm()
        return before

    shares, total = torch.stack(run_ranks(new_size, rank_main)), torch.stack(kept).sum(dim=0)
    assert (shares.sum(dim=0) - total).norm() <= 1e-5 * total.norm()


def test_a_residual_is_flushed_once() -> None:
    def rank_main(comm: Comm) -> None:
        rank = Rank(TwoStage(OneBit(), Memory()), comm)
        rank.step(torch.randn(NUM_VALUES), 0, ONE)
        kept = rank.kept()
        bucket = GradBucket(SHAPES, torch.ones(NUM_VALUES), 1)
        rank.exchange.flush_residual(bucket, comm)
        torch.testing.assert_close(bucket.flat.double(), kept + 1, rtol=1e-5, atol=1e-5)
        assert kept.any() and not rank.kept().any()

    run_ranks(2, rank_main)


def test_residuals_of_an_earlier_version_are_refused_in_a_line() -> None:
    old = {"residual": {"w": torch.ones(4, 64)}, "stripe_residual": {"w": torch.ones(2, 64)}}
    with pytest.raises(ValueError, match="an earlier version of the lab wrote these residuals"):
        TwoStage(OneBit(), Memory()).load_state_dict(old)


def test_memory_takes_a_flag() -> None:
    with pytest.raises(ValueError, match="exchange.error_feedback=1: must be true or false"):
        Memory(1)  # type: ignore[arg-type]
