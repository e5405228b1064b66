"""Reduce-scatter and split, as every Comm that tests can run has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lab.distributed.comm import Comm, run_ranks
from lab.distributed.torch_comm import TWO_WAY_BYTES
from lab.distributed.world import stop
from tests.support.ranks import join, spawn


def scatter_and_split(comm: Comm) -> tuple[list[float], int, list[float], int]:
    """Return this rank's part of a sum over all ranks, its payload, and both in its half."""
    tensor = torch.arange(4.0 * comm.size).view(comm.size, 4) + 100 * comm.rank
    part = torch.empty(4)
    comm.reduce_scatter(part, tensor)
    sent = comm.traffic.payload_bytes
    half = comm.split(color=comm.rank % 2)
    gathered = torch.empty(half.size)
    half.all_gather(gathered, torch.tensor([float(comm.rank)]))
    return part.tolist(), sent, gathered.tolist(), comm.traffic.payload_bytes - sent


def check(size: int, results: Sequence[Any]) -> None:
    of_ranks = 100.0 * sum(range(size))
    for rank, (part, sent, gathered, sent_in_half) in enumerate(results):
        assert part == [size * (4 * rank + i) + of_ranks for i in range(4)]
        assert sent == (size - 1) * 16
        assert gathered == [float(other) for other in range(rank % 2, size, 2)]
        assert sent_in_half == 4 * (len(gathered) - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_threads(size: int) -> None:
    check(size, run_ranks(size, scatter_and_split))


def test_what_is_not_counted_leaves_parts_of_a_comm_counting() -> None:
    """As after an evaluation, which broadcasts buffers."""

    def rank_main(comm: Comm) -> int:
        part = comm.split(0)
        with comm.traffic.uncounted():
            comm.all_reduce(torch.zeros(8))
        part.all_reduce(torch.zeros(4))
        return comm.traffic.payload_bytes

    assert run_ranks(2, rank_main) == [16, 16]


def rows_and_both_ways(comm: Comm) -> tuple[list[float], bool, int]:
    """Gather rows in place, and send messages so large that both directions have connections."""
    rows = torch.full((comm.size, 4), -1.0)
    rows[comm.rank] = comm.rank
    before = comm.traffic.payload_bytes
    comm.iall_gather_rows(rows).wait()
    sent = comm.traffic.payload_bytes - before
    n = TWO_WAY_BYTES + 1
    tensor = (10 * comm.rank + torch.arange(comm.size)).to(torch.uint8).repeat_interleave(n)
    output = torch.empty(comm.size, n, dtype=torch.uint8)
    comm.all_to_all(output, tensor.view(comm.size, n))
    expected = (10 * torch.arange(comm.size) + comm.rank).to(torch.uint8)
    return rows[:, 0].tolist(), bool((output == expected[:, None]).all()), sent


@pytest.mark.parametrize("size", [1, 4])
def test_rows_and_large_messages_of_threads(size: int) -> None:
    check_rows(size, run_ranks(size, rows_and_both_ways))


def check_rows(size: int, results: list[Any]) -> None:
    assert results == [([float(rank) for rank in range(size)], True, (size - 1) * 16)] * size


def on_gloo() -> tuple[Any, Any]:
    comm = join().comm
    result = scatter_and_split(comm), rows_and_both_ways(comm)
    stop()
    return result


def test_gloo() -> None:
    scattered, rows = zip(*spawn(3, on_gloo), strict=True)
    check(3, scattered)
    check_rows(3, list(rows))
