"""Reduce-scatter and split, as every Comm that tests can run has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lab.distributed.comm import Comm
from lab.distributed.thread_comm import run_ranks
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


def check(size: int, results: list[Any]) -> None:
    of_ranks = 100.0 * sum(range(size))
    for rank, (part, sent, gathered, sent_in_half) in enumerate(results):
        assert part == [size * (4 * rank + i) + of_ranks for i in range(4)]
        assert sent == (size - 1) * 16
        assert gathered == [float(other) for other in range(rank % 2, size, 2)]
        assert sent_in_half == 4 * (len(gathered) - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_threads(size: int) -> None:
    check(size, run_ranks(size, scatter_and_split))


def on_gloo() -> tuple[list[float], int, list[float], int]:
    result = scatter_and_split(join().comm)
    stop()
    return result


def test_gloo() -> None:
    check(3, spawn(3, on_gloo))
