"""A schedule of exchanges: which steps are whose, what is refused. See also test_feedback.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm, run_ranks
from lab.exchange.allreduce import AllReduce
from lab.exchange.auto import Auto
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import OneBit, TopK
from lab.exchange.powersgd import PowerSGD
from lab.exchange.schedule import Schedule
from lab.settings.config import load
from lab.simulate.strategy import Strategy

SHAPES = {"fc": torch.Size((12, 70)), "bias": torch.Size((12,)), "conv": torch.Size((6, 5, 3, 3))}
NUM_VALUES = sum(shape.numel() for shape in SHAPES.values())
NUM_STEPS = 9


one_bit = partial(OneBit, min_columns=1)


def whole(until: tuple[float, ...] = (3, 6)) -> Schedule:
    made = Schedule(AllReduce(), PowerSGD(1), one_bit(), until)
    made.total_steps = NUM_STEPS
    return made


def steps(exchange: Exchange, gradients: Tensor, comm: Comm, first: int = 0) -> Iterator[Tensor]:
    """Exchange this rank's `gradients` [steps, values] from step `first` on; yield each mean."""
    for step, gradient in enumerate(gradients[first:], start=first):
        bucket = GradBucket(SHAPES, gradient.clone(), step)
        exchange.average(bucket, comm)
        yield bucket.flat


def test_a_phase_that_tries_exchanges_is_settled_when_it_has_chosen() -> None:
    def rank_main(comm: Comm) -> tuple[int | None, int | None]:
        tries = Auto({"topk": TopK(0.1), "onebit": one_bit()}, ["topk", "onebit"], 1, 0.0)
        exchange = Schedule(one_bit(), tries, None, (2,))
        before = exchange.settled_at
        list(steps(exchange, torch.zeros(60, NUM_VALUES), comm))
        return before, exchange.settled_at

    for before, after in run_ranks(2, rank_main):
        assert before is None and after is not None and after > 2


@pytest.mark.parametrize(
    ("until", "ends"), [((3, 6), [3, 6]), ((0.34, 0.67), [3, 6]), ((0.01, 0.9), [0, 8])]
)
def test_each_step_is_that_of_its_phase(until: tuple[float, ...], ends: list[int]) -> None:
    ran: list[str] = []

    class Noting(AllReduce):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Any]:
            ran.append(self.name)
            return super().stages(bucket, comm)

    exchange = Schedule(Noting("a"), Noting("b"), Noting("c"), until)
    exchange.total_steps = NUM_STEPS
    run_ranks(1, lambda comm: list(steps(exchange, torch.zeros(NUM_STEPS, NUM_VALUES), comm)))
    first, second = ends
    assert ran == ["a"] * first + ["b"] * (second - first) + ["c"] * (NUM_STEPS - second)
    assert exchange.choices() == [
        {"chosen": "Noting", "first_step": 0, "end_step": first},
        {"chosen": "Noting", "first_step": first, "end_step": second},
        {"chosen": "Noting", "first_step": second, "end_step": None},
    ]


@pytest.mark.parametrize("stop", [2, 3, 5, 6, 8])  # before, at and after each switch
def test_a_loaded_state_goes_on_in_the_same_bits(stop: int) -> None:
    gradients = torch.randn(3, NUM_STEPS, NUM_VALUES)

    def rank_main(comm: Comm) -> bool:
        exchange, resumed, mine = whole(), whole(), gradients[comm.rank]
        list(steps(exchange, mine[:stop], comm))
        resumed.load_state_dict(exchange.state_dict())
        rest = [steps(each, mine, comm, stop) for each in (exchange, resumed)]
        return all(torch.equal(one, other) for one, other in zip(*rest, strict=True))

    assert run_ranks(3, rank_main) == [True] * 3


def test_it_is_what_its_phases_are() -> None:
    assert Schedule(AllReduce(), AllReduce(), None, (5,)).exact
    assert not whole().exact
    shares, gradients = Schedule(AllReduce(), one_bit(), None, (0.5,)), torch.zeros(1, NUM_VALUES)
    with pytest.raises(ValueError, match=r"exchange.until=\[0.5\]: your own loop has no known len"):
        run_ranks(1, lambda comm: list(steps(shares, gradients, comm)))


def test_phases_are_chosen_on_the_command_line() -> None:
    settings = ("exchange.third=null", "exchange.until=[20]", "exchange.second.ratio=0.5")
    chosen = load(["exchange=schedule", "exchange@exchange.second=topk", *settings]).exchange
    assert chosen.second.ratio == 0.5 and chosen.third is None and list(chosen.until) == [20]


def test_a_prediction_of_phases_in_steps_needs_the_length_of_the_run() -> None:
    def strategy(*settings: str) -> Strategy:
        return Strategy.of(load(["strategy=schedule", "exchange.until=[20,60]", *settings]))

    assert strategy("steps=200").exchange["until"] == [0.1, 0.3]
    assert strategy("steps=50").exchange["until"] == [0.4]
    assert strategy("steps=50").exchange["third"] is None
    with pytest.raises(ValueError, match=r"until=\[20, 60\]: a prediction needs the length"):
        strategy()
    for settings in ([], ["steps=200"]):
        with pytest.raises(ValueError, match=r"until=\[20\]: must be 2 increasing numbers, for 3"):
            strategy("exchange.until=[20]", *settings)
