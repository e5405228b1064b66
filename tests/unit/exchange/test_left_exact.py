"""What a codec leaves as it is: counted by what exchanges deliver, and said in a line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm, run_ranks
from lab.exchange.allreduce import AllReduce
from lab.exchange.auto import Auto
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import Int8, OneBit, SignSGD, TopK, left_exact
from lab.exchange.hierarchical import Hierarchical
from lab.exchange.powersgd import PowerSGD
from lab.exchange.schedule import Schedule

SHAPES = {
    "narrow": torch.Size((40, 48)),
    "bias": torch.Size((40,)),
    "wide": torch.Size((12, 70)),
    "conv": torch.Size((6, 2, 3, 3)),
    "scalar": torch.Size(()),
}
TOTAL = sum(shape.numel() for shape in SHAPES.values())

CODECS: dict[str, Callable[[], Exchange]] = {
    "onebit": OneBit,
    "onebit of narrower rows": lambda: OneBit(min_columns=40),
    "onebit of blocks": lambda: OneBit(granularity="block", block_size=100),
    "powersgd": PowerSGD,
    "powersgd of rank 12": lambda: PowerSGD(12),
    "signsgd": lambda: SignSGD(min_values=500),
    "two levels, onebit": lambda: Hierarchical(OneBit()),
    "two levels, powersgd": lambda: Hierarchical(PowerSGD(6)),
    "two levels, signsgd": lambda: Hierarchical(SignSGD(min_values=500)),
    "a schedule": lambda: Schedule(SignSGD(min_values=500), AllReduce(), None, [3]),
    "int8": Int8,
}
NODES = {"apart": [[0], [1], [2], [3]], "2 + 2": [[0, 1], [2, 3]], "one": [[0, 1, 2, 3]]}


@pytest.mark.parametrize(
    ("name", "nodes"), [(n, at) for n in CODECS for at in NODES if at == "apart" or "levels" in n]
)
def test_what_is_counted_as_left_is_what_arrives_exactly(name: str, nodes: str) -> None:
    gradients = torch.randn(4, TOTAL, dtype=torch.float64)

    def rank_main(comm: Comm) -> tuple[int, Tensor]:
        exchange = CODECS[name]()
        exchange.validate(comm)
        bucket = GradBucket(SHAPES, gradients[comm.rank].float())
        exchange.average(bucket, comm)
        return sum(number for number, _ in exchange.left_exact(SHAPES)), bucket.flat

    (counted, delivered), *_ = run_ranks(4, rank_main, NODES[nodes])
    exact = (delivered - gradients.mean(dim=0)).abs() < 1e-6
    assert counted == int(exact.sum()) or (name == "int8" and counted == 0)


def test_a_line_says_how_many_values_and_which() -> None:
    (line,) = left_exact(OneBit(), SHAPES)
    assert line == (
        "71 % of the values are sent as float32 (2,069 of 2,909): vectors, and rows shorter than "
        "exchange.min_columns=64"
    )


@pytest.mark.parametrize(
    ("exchange", "which"),
    [
        (
            OneBit(granularity="block"),
            "values that do not fill a block of exchange.block_size=1024",
        ),
        (PowerSGD(20), "vectors, and matrices that are no larger than factors of exchange.rank=20"),
        (SignSGD(), "tensors with fewer values than exchange.min_values=4096"),
        (Hierarchical(OneBit()), "rows shorter than exchange.inter.min_columns=64"),
        (Schedule(AllReduce(), OneBit(), None, [3]), "exchange.second.min_columns=64"),
    ],
)
def test_the_setting_is_named_where_it_is_written(exchange: Exchange, which: str) -> None:
    (line,) = left_exact(exchange, SHAPES)
    assert line.endswith(which)


def test_few_values_are_not_worth_a_line() -> None:
    shapes = {"wide": torch.Size((400, 400)), "bias": torch.Size((400,))}
    for exchange in (OneBit(), PowerSGD(), SignSGD(), Hierarchical(OneBit()), AllReduce(), TopK(1)):
        assert left_exact(exchange, shapes) == []


def test_a_run_that_ends_before_quantisation_starts_says_so() -> None:
    exchange = OneBit(warmup_steps=300)
    assert "min_columns" in left_exact(exchange, SHAPES)[0]
    exchange.total_steps = 100
    (line,) = left_exact(exchange, SHAPES)
    assert line == (
        "100 % of the values are sent as float32 (2,909 of 2,909): all steps of the run (100) are "
        "within exchange.warmup_steps=300"
    )


def test_one_node_leaves_nothing_to_the_exchange_between_nodes() -> None:
    def rank_main(comm: Comm) -> list[str]:
        exchanges = [Hierarchical(OneBit()), Hierarchical(AllReduce())]
        for exchange in exchanges:
            exchange.validate(comm)
        return [line for exchange in exchanges for line in left_exact(exchange, SHAPES)]

    (line,), _ = run_ranks(2, rank_main, [[0, 1]])
    assert line.endswith("there is only one node, but exchange.inter=OneBit runs between nodes")


def test_of_candidates_the_chosen_one_counts() -> None:
    exchange = Auto({"onebit": OneBit(), "signs": SignSGD()}, ["onebit", "signs"], 1, 0.0)
    assert left_exact(exchange, SHAPES) == []  # nothing is chosen yet
    exchange.load_state_dict({"chosen": {"narrow": torch.tensor(1)}, "tried": {}})
    (line,) = left_exact(exchange, SHAPES)
    assert line.endswith("exchange.candidates.signs.min_values=4096")
