"""The cost gate: the slower exchange is dropped, all ranks agree, and no residual is lost."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.distributed.thread_comm import run_ranks
from lab.exchange.allreduce import AllReduce
from lab.exchange.auto import Auto
from lab.exchange.bucket import GradBucket
from lab.exchange.none import NoExchange
from lab.exchange.onebit import OneBit

SHAPES = {"w": torch.Size((8, 80)), "bias": torch.Size((8,))}
NUM_VALUES = 648
NUM_TRIED = 2 * (1 + 1)  # steps, with one trial of each


class SlowOneBit(OneBit):
    def average(self, bucket: GradBucket, comm: Comm) -> None:
        time.sleep(0.02)
        super().average(bucket, comm)


class SlowOnRank1(AllReduce):
    def average(self, bucket: GradBucket, comm: Comm) -> None:
        super().average(bucket, comm)
        time.sleep(0.02 * comm.rank)


def steps(exchange: Auto, gradients: Tensor, comm: Comm, first: int = 0) -> Tensor:
    """Exchange `gradients` [steps, ranks, values]; return the sum delivered to this rank."""
    delivered = torch.zeros(NUM_VALUES, dtype=torch.float64)
    for step, of_ranks in enumerate(gradients, start=first):
        bucket = GradBucket(SHAPES, of_ranks[comm.rank].clone(), step)
        exchange.average(bucket, comm)
        delivered += comm.size * bucket.flat.double()
    return delivered


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_slower_is_dropped_and_what_it_owes_is_paid_back(size: int) -> None:
    gradients = torch.randn(8, size, NUM_VALUES)

    def rank_main(comm: Comm) -> tuple[Tensor, str, bool]:
        exchange = Auto(SlowOneBit(), AllReduce(), trials=1)
        steps(exchange, gradients[: 1 + NUM_TRIED], comm)
        owes = bool(exchange.state_dict()["residual"])
        exchange = Auto(SlowOneBit(), AllReduce(), trials=1)
        delivered = steps(exchange, gradients, comm)
        assert owes and not exchange.state_dict()["residual"]
        (choice,) = exchange.choices()
        return delivered, choice["chosen"], choice["compressed_s"] > choice["plain_s"]

    truth = gradients.double().sum(dim=(0, 1))
    for delivered, chosen, slower in run_ranks(size, rank_main):
        assert (chosen, slower) == ("AllReduce", True)
        torch.testing.assert_close(delivered, truth, rtol=1e-5, atol=1e-5)


def test_the_slowest_rank_decides_for_all() -> None:
    gradients = torch.randn(1 + NUM_TRIED, 3, NUM_VALUES)

    def rank_main(comm: Comm) -> list[dict[str, object]]:
        exchange = Auto(OneBit(), SlowOnRank1(), trials=1)
        steps(exchange, gradients, comm)
        return exchange.choices()

    choices = run_ranks(3, rank_main)
    assert choices == [choices[0]] * 3
    assert [choice["chosen"] for choice in choices[0]] == ["OneBit"]


def test_a_resume_keeps_what_was_decided() -> None:
    gradients = torch.randn(2 + NUM_TRIED, 2, NUM_VALUES)

    def rank_main(comm: Comm) -> tuple[Tensor, Tensor]:
        whole = Auto(OneBit(), SlowOnRank1(), trials=1)
        steps(whole, gradients[:-1], comm)
        resumed = Auto(OneBit(), SlowOnRank1(), trials=1)
        resumed.load_state_dict(whole.state_dict())
        return tuple(steps(one, gradients[-1:], comm, 9) for one in (whole, resumed))  # type: ignore[return-value]

    for whole, resumed in run_ranks(2, rank_main):
        assert torch.equal(whole, resumed)


def test_another_number_of_ranks_decides_anew() -> None:
    exchange = Auto(OneBit(), AllReduce(), trials=1)
    state = {"residual": {}, "stripe_residual": {}, "costs": {"w": torch.ones(2)}}
    assert exchange.redistribute([state] * 2, 0, 3)["costs"] == {}


def test_wrong_arguments_name_the_setting() -> None:
    with pytest.raises(ValueError, match=r"exchange\.trials=0: must be an integer of at least 1"):
        Auto(OneBit(), AllReduce(), trials=0)
    with pytest.raises(ValueError, match=r"exchange\.plain=OneBit: keeps residuals"):
        Auto(OneBit(), OneBit(), trials=1)
    with pytest.raises(
        ValueError, match=r"exchange\.compressed=NoExchange: does not keep replicas equal"
    ):
        Auto(NoExchange(), AllReduce(), trials=1)
