"""Every exchange at any number of ranks, as threads of this process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.distributed.thread_comm import run_ranks
from lab.exchange.allreduce import AllReduce
from lab.exchange.bucket import Bucket
from lab.exchange.exchange import Exchange
from lab.exchange.none import NoExchange
from lab.exchange.onebit import OneBit
from lab.exchange.ring import Ring
from lab.exchange.star import Star
from lab.exchange.tree import Tree, parent_and_children

EXACT = [AllReduce, Tree, Ring, Star]


def average(
    exchange: Exchange, gradients: list[Tensor], shape: tuple[int, ...] | None = None
) -> list[tuple[Tensor, int, int]]:
    """Each rank's result, payload bytes and messages of one exchange of `gradients`."""

    def rank_main(comm: Comm) -> tuple[Tensor, int, int]:
        flat = gradients[comm.rank].flatten().clone()
        exchange.average(Bucket({"w": torch.Size(shape or flat.shape)}, flat), comm)
        return flat, comm.traffic.payload_bytes, comm.traffic.num_messages

    return run_ranks(len(gradients), rank_main)


@pytest.mark.parametrize("num_values", [1, 7, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("exchange", EXACT)
def test_exact_exchanges_give_every_rank_the_mean(
    exchange: type[Exchange], size: int, num_values: int
) -> None:
    gradients = [torch.randn(num_values) for _ in range(size)]
    mean = torch.stack(gradients).double().mean(dim=0)
    results = [flat for flat, *_ in average(exchange(), gradients)]
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0].double(), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bf16_rounds_to_three_digits(size: int) -> None:
    gradients = [torch.randn(1000) for _ in range(size)]
    mean = torch.stack(gradients).mean(dim=0)
    result = average(AllReduce(dtype="bfloat16"), gradients)[0][0]
    assert 1e-5 < (result - mean).norm() / mean.norm() < 1e-2


def test_no_exchange_leaves_each_rank_its_own() -> None:
    gradients = [torch.randn(5), torch.randn(5)]
    for (result, payload, _), gradient in zip(
        average(NoExchange(), gradients), gradients, strict=True
    ):
        assert torch.equal(result, gradient)
        assert payload == 0


@pytest.mark.parametrize("size", range(1, 18))
def test_tree_is_a_tree_of_logarithmic_depth(size: int) -> None:
    for rank in range(size):
        parent, children = parent_and_children(rank, size)
        assert all(parent_and_children(child, size)[0] == rank for child in children)
        depth, node = 0, rank
        while (above := parent_and_children(node, size)[0]) is not None:
            node, depth = above, depth + 1
        assert node == 0
        assert depth <= math.ceil(math.log2(size))
        assert (parent is None) == (rank == 0)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_payload_is_what_theory_says_rank_by_rank(size: int) -> None:
    num_values = 840 * size
    gradients = [torch.randn(num_values) for _ in range(size)]
    num_bytes = 4 * num_values

    def payload(exchange: Exchange) -> list[int]:
        return [sent for _, sent, _ in average(exchange, gradients)]

    ring = 2 * num_bytes * (size - 1) // size
    assert payload(AllReduce()) == [ring] * size
    assert payload(AllReduce(dtype="bfloat16")) == [ring // 2] * size
    assert payload(Ring()) == [ring] * size
    assert payload(Star()) == [num_bytes * (size - 1)] + [num_bytes] * (size - 1)
    edges = [(rank > 0) + len(parent_and_children(rank, size)[1]) for rank in range(size)]
    assert payload(Tree()) == [num_bytes * count for count in edges]


@pytest.mark.parametrize("size", [2, 4])
def test_onebit_moves_a_quarter_byte_per_value_and_scales(size: int) -> None:
    rows, columns = 64 * size, 1024
    gradients = [torch.randn(rows * columns) for _ in range(size)]
    results = average(OneBit(), gradients, shape=(rows, columns))
    bits_and_scales = rows * columns / 8 + 8 * rows
    for _, payload, _ in results:
        assert payload == 2 * bits_and_scales * (size - 1) / size


def test_onebit_sends_28_times_less_than_a_ring_on_alexnet() -> None:
    size = 2
    shapes = {name: parameter.shape for name, parameter in _alexnet_on_meta().named_parameters()}
    num_values = sum(math.prod(shape) for shape in shapes.values())

    def rank_main(comm: Comm) -> int:
        generator = torch.Generator().manual_seed(comm.rank)
        flat = torch.randn(num_values, generator=generator)
        OneBit().average(Bucket(shapes, flat), comm)
        return comm.traffic.payload_bytes

    ring = 8 * num_values * (size - 1) / size
    assert ring / max(run_ranks(size, rank_main)) >= 28


def _alexnet_on_meta() -> torch.nn.Module:
    from lab.model.alexnet import alexnet

    return alexnet(dropout=0.5, image_shape=(3, 224, 224), num_classes=1000)


def test_wrong_arguments_name_the_setting() -> None:
    with pytest.raises(ValueError, match=r"exchange.threshold=half: allowed are zero, mean"):
        OneBit(threshold="half")
    with pytest.raises(ValueError, match=r"exchange.block_size=0"):
        OneBit(block_size=0)
    with pytest.raises(ValueError, match=r"exchange.dtype=float8"):
        AllReduce(dtype="float8")
