"""Auto: the fastest wins on all ranks, residuals survive each switch; which steps are timed."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm, SilentComm, run_ranks
from lab.exchange.allreduce import AllReduce
from lab.exchange.auto import NEAR, Auto, Tuner, probe_cost
from lab.exchange.base import Exchange, Shapes
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import OneBit, TopK
from tests.support.cases import maker

PLANS = (  # buckets of the first step and of later ones
    ({"w": torch.Size((8, 80)), "bias": torch.Size((8,))}, {"v": torch.Size((8, 70))}),
    ({"v": torch.Size((8, 70)), "bias": torch.Size((8,))}, {"w": torch.Size((8, 80))}),
)

SHAPES = PLANS[0][0] | PLANS[0][1]

NUM_VALUES = 1208

LATE = 19  # the step at which 3 candidates, and the cheapest of each bucket, have had a round


class Clock(threading.local):
    """A rank's own time, which passes where an exchange says so, and a little at each look."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-5
        return self.now_s


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.measure.clock.time", SimpleNamespace(perf_counter=CLOCK))


class Slow(AllReduce):
    """Waits while it sends, so that no cost probe foresees it."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if not isinstance(comm, SilentComm):
            CLOCK.now_s += 0.03
        super().average(bucket, comm)


class SlowOnRank1(AllReduce):
    def average(self, bucket: GradBucket, comm: Comm) -> None:
        super().average(bucket, comm)
        CLOCK.now_s += 0.03 * comm.rank


class LeavesAll(AllReduce):
    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        yield sum(shape.numel() for shape in shapes.values()), key


class SlowFor(LeavesAll):
    def __init__(self, parameter: str) -> None:
        super().__init__()
        self.parameter = parameter

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        super().average(bucket, comm)
        CLOCK.now_s += 0.03 * (self.parameter in bucket.shapes)


def auto(rounds: int = 1, **candidates: Exchange) -> Auto:
    return Auto(candidates, list(candidates), rounds, tolerance=0.01)


def steps(exchange: Exchange, gradients: Tensor, comm: Comm, first: int = 0) -> Tensor:
    """Exchange `gradients` [steps, ranks, values]; return the sum delivered, by parameter."""
    delivered: dict[str, Tensor] = {}
    for step, of_ranks in enumerate(gradients, start=first):
        values = dict(zip("vwb", of_ranks[comm.rank].split((560, 640, 8)), strict=True))
        for shapes in PLANS[min(step, 1)]:
            flat = torch.cat([values[name[0]] for name in shapes])
            bucket = GradBucket(dict(shapes), flat, step)
            exchange.average(bucket, comm)
            for name, start, stop in bucket.spans():
                mean = comm.size * bucket.flat[start:stop].double()
                delivered[name] = delivered.get(name, 0) + mean
    return torch.cat([delivered[name] for name in ("v", "w", "bias")])


def kept(exchange: Exchange, comm: Comm) -> Tensor:
    values = {"v": torch.zeros(560), "w": torch.zeros(640), "bias": torch.zeros(8)}
    for name, start, own in exchange.residuals(SHAPES, comm):
        values[name][start : start + len(own)] += own
    return torch.cat(list(values.values())).double()


def chosen(exchange: Auto) -> dict[str, str]:
    return {each["bucket"]: each["chosen"] for each in exchange.choices() if "bucket" in each}


@pytest.mark.parametrize("size", [1, 3])
def test_the_fastest_wins_and_no_gradient_is_lost(size: int) -> None:
    gradients, onebit = torch.randn(LATE + 2, size, NUM_VALUES), maker("onebit", "min_columns=1")

    def rank_main(comm: Comm) -> Any:
        exchange = auto(onebit=onebit(), slow=Slow(), topk=TopK(0.1))
        sums = []
        for at, gradient in enumerate(gradients):
            sums.append(steps(exchange, gradient[None], comm, at))
        (last,) = exchange.choices()[-1:]
        return sum(sums), kept(exchange, comm), chosen(exchange), last, exchange.settled_at

    truth = gradients.double().sum(dim=(0, 1))
    results = run_ranks(size, rank_main)
    delivered, _, names, last, settled_at = results[0]
    residual = sum(own for _, own, *_ in results)
    torch.testing.assert_close(delivered + residual, truth, rtol=1e-4, atol=1e-4)
    for other in results:
        assert torch.equal(other[0], delivered) and other[2:] == results[0][2:]
    assert set(names) == {"v", "w"} and "slow" not in names.values()
    assert last["step_s"].get("slow", math.inf) > 0.05
    assert settled_at == last["chosen_at"] <= LATE


def test_the_slowest_rank_decides_for_all() -> None:
    gradients = torch.randn(LATE, 3, NUM_VALUES)

    def rank_main(comm: Comm) -> dict[str, str]:
        exchange = auto(late=SlowOnRank1(), onebit=OneBit())
        steps(exchange, gradients, comm)
        return chosen(exchange)

    assert run_ranks(3, rank_main) == [{"v": "onebit", "w": "onebit"}] * 3


def test_each_bucket_may_have_its_own() -> None:
    gradients = torch.randn(LATE, 2, NUM_VALUES)

    def rank_main(comm: Comm) -> tuple[dict[str, str], list[tuple[int, str]]]:
        exchange = auto(one=SlowFor("w"), other=SlowFor("v"))
        steps(exchange, gradients, comm)
        left = [(n, key.rpartition(".")[2]) for n, key in exchange.left_exact(SHAPES)]
        return chosen(exchange), left

    choice, left = {"v": "one", "w": "other"}, [(568, "one"), (640, "other")]
    assert run_ranks(2, rank_main) == [(choice, left)] * 2


def test_trials_end_after_half_of_a_run() -> None:
    gradients = torch.randn(8, 2, NUM_VALUES)

    def rank_main(comm: Comm) -> int | None:
        exchange = auto(3, allreduce=AllReduce(), onebit=OneBit(), topk=TopK(0.1))
        exchange.total_steps = 8
        steps(exchange, gradients, comm)
        return exchange.settled_at

    assert run_ranks(2, rank_main) == [4, 4]


def test_a_resume_keeps_what_was_decided_and_another_number_of_ranks_does_not() -> None:
    gradients = torch.randn(LATE + 1, 2, NUM_VALUES)

    def rank_main(comm: Comm) -> tuple[Tensor, Tensor, dict[str, Any]]:
        whole, resumed = (auto(onebit=OneBit(), slow=Slow()) for _ in range(2))
        steps(whole, gradients[:-1], comm)
        state = whole.state_dict()
        resumed.load_state_dict(state)
        assert chosen(resumed) == chosen(whole) and resumed.settled_at == 0
        ends = [steps(one, gradients[-1:], comm, LATE) for one in (whole, resumed)]
        return ends[0], ends[1], state

    results = run_ranks(2, rank_main)
    for whole, resumed, _ in results:
        assert torch.equal(whole, resumed)
    anew = auto(onebit=OneBit(), slow=Slow())
    state = anew.redistribute([state for _, _, state in results], 0, 3)
    assert state["chosen"] == {} and state["onebit.residual"]


@pytest.mark.parametrize("name", ["allreduce", "bf16", "int8", "onebit", "topk", "ring"])
def test_a_cost_probe_counts_the_bytes_that_are_sent_then(name: str) -> None:
    make, shapes = maker(name), {"w": torch.Size((64, 128))}

    def rank_main(comm: Comm) -> tuple[int, int]:
        bucket = GradBucket(shapes, torch.randn(64 * 128))
        before, exchange = bucket.flat.clone(), make()
        _, _, foreseen = probe_cost(exchange, bucket, comm)
        assert comm.traffic.payload_bytes == 0 and torch.equal(bucket.flat, before)
        exchange.average(bucket, comm)
        return foreseen, comm.traffic.payload_bytes

    for foreseen, sent in run_ranks(3, rank_main):
        assert foreseen == sent > 0


def tuner_of(predicted: list[float], rounds: int, tolerance: float = 0.01) -> Tuner:
    return Tuner(predicted, predicted, rounds, tolerance)


def held(tuner: Tuner, steps: list[float], noise: float = 0.0, seed: int = 0) -> list[int]:
    """Run a tuner among configurations whose steps take `steps` s; return its visits."""
    chance, visits = random.Random(seed), []
    while tuner.winner is None:
        visits.append(tuner.current)
        own = steps[tuner.current]
        times = [own * (1 + chance.gauss(0, noise)) for _ in range(tuner.num_timed)]
        tuner.end_visit(times)
    return visits


def test_the_fastest_wins_whatever_was_predicted() -> None:
    tuner = tuner_of([1.0, 0.5, 0.2, 0.1], 3)
    held(tuner, [2.0, 1.0, 1.2, 1.5])
    assert tuner.winner == 1


def test_what_alone_outlasts_a_whole_step_of_another_is_not_tried() -> None:
    tuner = Tuner([9.0, 1.5, 0.1], [5.0, 1.2, 0.1], rounds=3, tolerance=0.01)
    visits = held(tuner, [10.0, 1.5, 1.0])
    assert visits == [2, 1] and tuner.winner == 2
    assert tuner.medians() == {1: 1.5, 2: 1.0}


def test_a_preferred_one_wins_unless_another_is_clearly_faster() -> None:
    for first, winner in ((1.009, 0), (1.02, 1)):
        tuner = tuner_of([0.3, 0.2], 2)
        held(tuner, [first, 1.0])
        assert tuner.winner == winner


def test_later_rounds_have_the_fastest_and_the_preferred_one_in_the_other_order() -> None:
    steps = [1.05, 1.04, 1.03, 1.02, 1.01, 1.005, 1.0, 1 + 2 * NEAR]
    tuner = tuner_of([0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], 3, 0.0)
    first, second, third = [7, 6, 5, 4, 3, 2, 1, 0], [0, 2, 3, 4, 5, 6], [6, 5, 4, 0]
    assert held(tuner, steps) == first + second + third


def test_the_first_visit_of_each_has_two_cold_steps() -> None:
    tuner = tuner_of([0.1, 0.2], 2)
    assert tuner.num_untimed == 2
    for steps in ([1.0, 1.0], [1.0, 1.0]):
        tuner.end_visit(steps)
    assert tuner.num_untimed == 1


def test_noise_costs_little() -> None:
    chance, behind = random.Random(1), list[float]()
    for seed in range(200):
        steps = [chance.uniform(1.0, 1.5) for _ in range(11)]
        tuner = tuner_of([step / 2 for step in steps], 4)
        held(tuner, steps, 0.05, seed)
        assert tuner.winner is not None
        behind.append(steps[tuner.winner] / min(steps) - 1)
    assert sum(each <= 0.03 for each in behind) >= 0.9 * len(behind)
    assert max(behind) < 0.08


def test_a_contest_that_is_stopped_takes_what_is_known() -> None:
    tuner = tuner_of([0.3, 0.1, 0.2], 3)
    tuner.stop()
    assert tuner.winner == 1  # by prediction
    tuner = tuner_of([0.3, 0.1, 0.2], 3)
    tuner.end_visit([1.0])
    tuner.end_visit([0.9])
    tuner.stop()
    assert tuner.winner == 2  # by whole steps


def test_one_stall_drops_nobody() -> None:
    tuner = tuner_of([0.1, 0.2], 2, 0.0)
    tuner.end_visit([1.0, 9.0])
    tuner.end_visit([1.05, 1.05])
    tuner.end_visit([1.05] * 3)
    tuner.end_visit([1.0] * 3)
    assert tuner.winner == 0
