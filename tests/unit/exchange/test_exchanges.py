"""Every exchange at any number of ranks, as threads of this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm, run_ranks
from lab.exchange.allreduce import AllReduce, NoExchange
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.grouping import MIB, Node, binomial_node, in_order_node
from lab.exchange.paths import DoubleTree, Ring, Star, Tree
from lab.settings.config import build, load
from tests.support.cases import EXACT, exchange_settings, maker
from tests.support.slow import some_of

CHUNKED = [exchange for exchange in EXACT if "chunk_mb" in exchange_settings(exchange)]
IN_CHUNKS = list({type(maker(exchange)()): None for exchange in CHUNKED})
SMALL = 4 * 64 / MIB  # chunks of at most 64 values


def average(exchange: Exchange, gradients: list[Tensor]) -> list[tuple[Tensor, int]]:
    """Return each rank's result and payload bytes of one exchange of `gradients`."""

    def rank_main(comm: Comm) -> tuple[Tensor, int]:
        flat = gradients[comm.rank].clone()
        own = deepcopy(exchange)  # one object serves one rank
        own.average(GradBucket({"w": flat.shape}, flat), comm)
        return flat, comm.traffic.payload_bytes

    return run_ranks(len(gradients), rank_main)


@pytest.mark.parametrize("size", some_of([1, 2, 3, 4, 5, 8], every=2))
@pytest.mark.parametrize(
    ("exchange", "chunks"),
    [
        *(pytest.param(exchange, {}, id=exchange) for exchange in EXACT),
        *(pytest.param(e, {"chunk_mb": SMALL}, id=f"{e} in chunks") for e in CHUNKED),
    ],
)
def test_exact_exchanges_give_every_rank_the_mean(
    exchange: str, chunks: dict[str, float], size: int
) -> None:
    made = maker(exchange, **chunks)()
    for num_values in (1, 7, 1000):
        gradients = [torch.randn(num_values) for _ in range(size)]
        mean = torch.stack(gradients).double().mean(dim=0)
        results = [flat for flat, _ in average(made, gradients)]
        assert all(torch.equal(result, results[0]) for result in results)
        torch.testing.assert_close(results[0].double(), mean, rtol=1e-6, atol=1e-6)


def test_bf16_rounds_to_three_digits() -> None:
    gradients = [torch.randn(1000) for _ in range(3)]
    mean = torch.stack(gradients).mean(dim=0)
    result = average(AllReduce(dtype="bfloat16"), gradients)[0][0]
    assert 1e-5 < (result - mean).norm() / mean.norm() < 1e-2


def test_no_exchange_leaves_each_rank_its_own() -> None:
    gradients = [torch.randn(5), torch.randn(5)]
    for (result, payload), gradient in zip(
        average(NoExchange(), gradients), gradients, strict=True
    ):
        assert torch.equal(result, gradient)
        assert payload == 0


TREES = [binomial_node, partial(in_order_node, tree=0), partial(in_order_node, tree=1)]


@pytest.mark.parametrize("place", TREES)
def test_trees_are_trees_of_logarithmic_depth(place: Callable[[int, int], Node]) -> None:
    for size in (*range(1, 18), 100):
        nodes = [place(rank, size) for rank in range(size)]
        (root,) = (rank for rank in range(size) if nodes[rank].parent is None)
        for rank, node in enumerate(nodes):
            assert all(nodes[child].parent == rank for child in node.children)
            above, depth = rank, 0
            while (parent := nodes[above].parent) is not None:
                assert above in nodes[parent].children
                above, depth = parent, depth + 1
            assert above == root
            assert node.depth == depth <= math.log2(size)


def test_a_rank_is_within_one_of_two_trees_and_a_leaf_of_the_other() -> None:
    for size in (*range(2, 18), 100):
        for rank in range(size):
            first, second = (in_order_node(rank, size, tree).children for tree in (0, 1))
            assert not (first and second)
            assert len(first + second) <= 2
            assert first or second or (rank == 0 and size % 2 == 1)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("exchange", IN_CHUNKS)
def test_chunks_change_no_bit_of_buckets_of_many_sizes(
    exchange: type[Tree | DoubleTree | Ring], size: int
) -> None:
    gradients = torch.randn(size, 4010)

    def rank_main(comm: Comm) -> list[Tensor]:
        ended = list[Tensor]()
        for one in (exchange(chunk_mb=None), exchange(chunk_mb=SMALL)):
            flats = gradients[comm.rank].clone().split([1000, 10, 3000])
            for flat in flats:
                one.average(GradBucket({"w": flat.shape}, flat), comm)
            ended.append(torch.cat(flats))
        return ended

    for whole, in_chunks in run_ranks(size, rank_main):
        torch.testing.assert_close(whole, gradients.mean(dim=0), rtol=1e-6, atol=1e-6)
        assert torch.equal(in_chunks, whole)


@pytest.mark.parametrize("name", [e for e in CHUNKED if exchange_settings(e)["chunk_mb"]])
def test_chunks_are_as_large_as_the_library_likes_them(name: str) -> None:
    gradients = [torch.zeros(1000)] * 4

    def num_messages(backend: str, *settings: str) -> int:
        config = load([f"exchange={name}", *settings])

        def rank_main(comm: Comm) -> int:
            comm.backend = backend
            exchange = build(config.exchange)
            exchange.average(
                GradBucket({"w": torch.Size((1000,))}, gradients[comm.rank].clone()), comm
            )
            return comm.traffic.num_messages

        return max(run_ranks(4, rank_main))

    each = f"exchange.chunk_mb={{gloo: {SMALL}, nccl: null}}"
    many, few = num_messages("gloo", each), num_messages("nccl", each)
    assert few < many == num_messages("threads", each)
    for backend in ("gloo", "nccl"):
        assert num_messages(backend, f"exchange.chunk_mb={SMALL}") == many
        assert num_messages(backend, "exchange.chunk_mb=null") == few
        assert num_messages(backend) == few  # one chunk of either by default


@pytest.mark.parametrize("size", [2, 3, 8])
def test_payload_is_what_theory_says_rank_by_rank(size: int) -> None:
    num_values = 840 * size
    gradients = [torch.randn(num_values) for _ in range(size)]
    num_bytes = 4 * num_values

    def payload(exchange: Exchange) -> list[int]:
        return [sent for _, sent in average(exchange, gradients)]

    ring = 2 * num_bytes * (size - 1) // size
    assert payload(AllReduce()) == [ring] * size
    assert payload(AllReduce(dtype="bfloat16")) == [ring // 2] * size
    assert payload(Ring()) == payload(Ring(chunk_mb=SMALL)) == [ring] * size
    assert payload(Star()) == [num_bytes * (size - 1)] + [num_bytes] * (size - 1)

    def edges(rank: int, place: Callable[[int, int], Node]) -> int:
        node = place(rank, size)
        return (node.parent is not None) + len(node.children)

    ranks, (binomial, *two) = range(size), TREES
    whole = [num_bytes * edges(rank, binomial) for rank in ranks]
    halves = [num_bytes // 2 * sum(edges(rank, place) for place in two) for rank in ranks]
    assert payload(Tree()) == payload(Tree(chunk_mb=SMALL)) == whole
    assert payload(DoubleTree()) == payload(DoubleTree(chunk_mb=SMALL)) == halves
    assert max(halves) <= 2 * num_bytes
