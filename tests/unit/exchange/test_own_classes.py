"""Exchanges of a user's own: subclasses of the lab's do what they say, wherever they are used."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.codec.codecs import Int8
from lab.distributed.comm import Collective, Comm, run_ranks
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange, RankOfSize, kept_state
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import Lossy, TwoStage
from lab.exchange.gate import admit
from lab.exchange.hierarchical import Hierarchical
from lab.exchange.memory import Memory
from lab.exchange.scatter import scatter_of
from lab.exchange.schedule import Schedule
from lab.simulate.costs import Load
from lab.simulate.network import Network
from lab.sync.gradsync import GradSync
from tests.support.cases import LINKS
from tests.support.steps import made

SHAPES = {"w": torch.Size((6, 50)), "b": torch.Size((6,))}
NODES = ((0, 1), (2, 3))


class Vote(Lossy):
    """Signs of gradients and residuals: all that an exchange with error feedback defines."""

    def __init__(self) -> None:
        super().__init__(Memory())

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        left = self.residual(bucket, comm)
        left += bucket.flat
        sign = left.sign()
        left -= 0.1 * sign
        heard = torch.empty(comm.size, len(sign), dtype=torch.int8)
        yield comm.iall_gather(heard, sign.to(torch.int8))
        torch.mean(heard.float(), dim=0, out=bucket.flat).mul_(0.1)


class VoteAtOnce(Vote):
    """The same, of half the gradients."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        bucket.flat.div_(2)
        super().average(bucket, comm)
        bucket.flat.mul_(2)


class Gathered(AllReduce):
    """Has `average`, where its base class has stages."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        heard = bucket.flat.new_empty(comm.size, len(bucket.flat))
        comm.all_gather(heard, bucket.flat)
        torch.mean(heard, dim=0, out=bucket.flat)


class Negated(TwoStage):
    """Has stages around those of its base class."""

    def __init__(self) -> None:
        super().__init__(Int8(64), Memory(keeps=False))

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from super().stages(bucket, comm)
        bucket.flat.neg_()


class Keeps(Exchange):
    def __init__(self, state: Any) -> None:
        self.state = state

    def average(self, bucket: GradBucket, comm: Comm) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return self.state


class Rounded(Exchange):
    """Whole numbers, and residuals of its own, of which others do not learn."""

    exact = False

    def __init__(self) -> None:
        self.left: dict[str, Tensor] = {}

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        for name, start, stop in bucket.spans():
            values = bucket.flat[start:stop]
            values += self.left.get(name, 0.0)
            self.left[name] = values - values.round()
            values.round_()
        comm.all_reduce(bucket.flat)
        bucket.divide(bucket.flat, comm.size)

    def state_dict(self) -> dict[str, Any]:
        return {"left": dict(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = dict(state["left"])


class RoundedInParts(Rounded):
    """The same, and all that another exchange needs of them."""

    def add_residual(self, bucket: GradBucket, comm: RankOfSize) -> None:
        for name, start, stop in bucket.spans():
            bucket.flat[start:stop] += self.left.get(name, 0.0)

    def flush_residual(self, bucket: GradBucket, comm: RankOfSize) -> None:
        self.add_residual(bucket, comm)
        for name in bucket.shapes:
            self.left.pop(name, None)


def steps(make: type[Exchange], comm: Comm, count: int = 1, levels: bool = False) -> Any:
    """Return an exchange after some steps, the sum of gradients, and that of what it delivered."""
    exchange = Hierarchical(make()) if levels else make()
    exchange.validate(comm)
    bucket = GradBucket(dict(SHAPES), torch.empty(306))
    given, delivered = torch.zeros(306), torch.zeros(306)
    for bucket.step in range(count):
        chance = torch.Generator().manual_seed(10 * comm.rank + bucket.step)
        given += bucket.flat.normal_(generator=chance)
        for collective in exchange.stages(bucket, comm):
            collective.wait()
        delivered += bucket.flat
    return exchange, given, delivered


def test_residuals_of_which_others_do_not_learn_are_refused_in_parts() -> None:
    lacking = "exchange.inter=Rounded: keeps residuals of its own, so its class must also define "
    with pytest.raises(ValueError, match=f"^{lacking}add_residual, flush_residual"):
        Hierarchical(Rounded())
    with pytest.raises(ValueError, match=r"^exchange\.second=Rounded: keeps residuals"):
        Schedule(AllReduce(), Rounded(), None, [2])


@pytest.mark.parametrize(
    ("make", "levels"),
    [(Vote, False), (Vote, True), (VoteAtOnce, False), (VoteAtOnce, True), (RoundedInParts, True)],
)
def test_delivered_and_residuals_are_the_true_sum(make: type[Exchange], levels: bool) -> None:
    def rank_main(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        exchange, given, delivered = steps(make, comm, 3, levels)
        kept, starts = torch.zeros(306), {"w": 0, "b": 300}
        for name, first, values in exchange.residuals(SHAPES, comm):
            kept[starts[name] + first :][: len(values)] += values
        return given, delivered, kept * (2 if make is VoteAtOnce else 1)

    given, delivered, kept = zip(*run_ranks(4, rank_main, NODES), strict=True)
    assert all(torch.equal(each, delivered[0]) for each in delivered)
    torch.testing.assert_close(4 * delivered[0] + sum(kept), sum(given), atol=1e-5, rtol=0)


def test_residuals_go_on_with_another_number_of_ranks() -> None:
    states = [exchange.state_dict() for exchange, *_ in run_ranks(3, lambda c: steps(Vote, c))]
    shares = [Vote().redistribute(states, rank, 2)["residual"]["w"] for rank in range(2)]
    torch.testing.assert_close(sum(shares), sum(state["residual"]["w"] for state in states))


def test_own_stages_take_turns_with_those_of_other_buckets_only_if_they_say_so() -> None:
    """Over Gloo, two collectives of a kind would else meet those of another bucket."""
    assert not Vote().staged and type("Turns", (Vote,), {"staged": True})().staged
    again = {"staged": True, "stages": Vote.stages}
    assert type("Again", (VoteAtOnce,), again)().staged and AllReduce().staged


def test_an_own_average_gets_no_gradients_that_are_divided_for_a_sum() -> None:
    def gradient(make: type[Exchange], comm: Comm) -> Tensor:
        model = nn.Linear(3, 1, bias=False)
        sync = made(GradSync, model, comm, make())
        with sync, sync.micro_batch(last=True):
            model(torch.ones(1, 3)).sum().backward(torch.tensor(sync.loss_factor))
        sync.finish()
        assert model.weight.grad is not None
        return model.weight.grad

    for make in (AllReduce, Gathered, VoteAtOnce):
        assert make.accepts_prescaled == (make is AllReduce)
    for make in (AllReduce, Gathered):
        assert all(g.eq(1).all() for g in run_ranks(4, partial(gradient, make)))


def test_own_average_takes_the_place_of_inherited_stages() -> None:
    assert not Gathered().staged
    first, second = run_ranks(2, lambda comm: steps(Gathered, comm))
    torch.testing.assert_close(first[2], (first[1] + second[1]) / 2)


def test_two_levels_run_an_inner_exchange_as_it_is() -> None:
    results = run_ranks(4, lambda comm: steps(Negated, comm, levels=True), NODES)
    mean = torch.stack([given for _, given, _ in results]).mean(dim=0)
    torch.testing.assert_close(results[0][2], -mean, atol=0.05, rtol=0)


@pytest.mark.parametrize("make", [Gathered, Negated])
def test_a_reduce_scatter_that_would_be_another_exchange_is_refused(make: type[Exchange]) -> None:
    with pytest.raises(ValueError, match=rf"^exchange={make.__name__} has no reduce-scatter"):
        scatter_of(make())


def test_a_formula_of_other_code_is_not_used() -> None:
    """Gathering takes N-1 messages, an all-reduce 2(N-1)/N."""
    load = Load([(6, 50), (6,)], "mine.Gathered", Network(LINKS, 4))
    load.add(Gathered())
    assert sum(stage.payload_bytes for stage in load.stages) == 3 * 4 * 306


def test_state_is_lost_neither_on_a_resume_nor_when_saved() -> None:
    with pytest.raises(ValueError, match=r"its state of 3 ranks cannot be divided among 2, beca"):
        Keeps({}).redistribute([{}] * 3, 0, 2)
    assert kept_state(Keeps(state := {"left": {"w": torch.ones(3)}})) == state
    for wrong in ({"left": torch.ones(3)}, {"left": {"w": 1}}, [torch.ones(3)]):
        with pytest.raises(ValueError, match=r"^exchange=Keeps: state_dict must return tensors by"):
            kept_state(Keeps(wrong))


class YieldsNone(Vote):
    def stages(self, bucket: GradBucket, comm: Comm) -> Any:
        yield None


class NeverYields(Vote):
    def stages(self, bucket: GradBucket, comm: Comm) -> Any:
        bucket.flat.zero_()


@pytest.mark.parametrize("make", [YieldsNone, NeverYields])
def test_stages_that_yield_no_collective_are_named(make: type[Exchange]) -> None:
    bucket = GradBucket(SHAPES, torch.ones(306), step=0)
    line = f"^exchange={make.__name__}: stages yields NoneType; it must yield each collective"
    with pytest.raises(TypeError, match=line):
        run_ranks(2, lambda comm: make().average(bucket, comm))


def test_what_is_no_exchange_is_refused() -> None:
    other: Any = object()
    with pytest.raises(ValueError, match=r"^exchange=object: must be a subclass of lab.exchange"):
        admit(nn.Linear(2, 2), other)
