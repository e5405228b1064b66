"""Exchanges made of send and recv, on the strictest library that Comm allows."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm, Handle, ThreadComm, Transfer, run_ranks
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.grouping import MIB
from tests.support.cases import EXACT, exchange_settings, maker

Batch = tuple[Counter[int], Counter[int]]  # how many messages to, and from, which rank

SEND_RECV = [exchange for exchange in EXACT if maker(exchange)().needs_send_recv]
EXCHANGES = [maker(exchange) for exchange in SEND_RECV]
EXCHANGES += [
    maker(exchange, chunk_mb=4 * num_values / MIB)
    for exchange in SEND_RECV
    if "chunk_mb" in exchange_settings(exchange)
    for num_values in (16, 1000)
]


class LateBatch:
    """Transfers that begin only when they are waited for."""

    def __init__(self, begin: Callable[[], Handle], places: list[range]) -> None:
        self.begin = begin
        self.places = places  # in memory, to be filled

    def wait(self) -> None:
        self.begin().wait()
        self.places.clear()


class LateComm(ThreadComm):
    """A comm that sends as late as allowed, receives NaN until then, and keeps all batches."""

    def __init__(self, comm: ThreadComm) -> None:
        super().__init__(comm.rank, comm.size, comm.meeting)
        self.batches: list[Batch] = []
        self.under_way: list[LateBatch] = []

    def _isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> LateBatch:
        self.batches.append((Counter(to for _, to in sends), Counter(by for _, by in receives)))
        taken = [place for batch in self.under_way for place in batch.places]
        for tensor, _ in [*sends, *receives]:
            assert not any(overlap(in_memory(tensor), place) for place in taken)
        for tensor, _ in receives:
            tensor.fill_(torch.nan)
        begin = partial(super()._isend_irecv, sends, receives)
        self.under_way.append(LateBatch(begin, [in_memory(tensor) for tensor, _ in receives]))
        return self.under_way[-1]


def in_memory(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def average_late(exchange: Callable[[], Exchange], size: int) -> list[tuple[Tensor, list[Batch]]]:
    """Return each rank's result for the mean of vectors full of its number, and its batches."""

    def rank_main(comm: Comm) -> tuple[Tensor, list[Batch]]:
        assert isinstance(comm, ThreadComm)
        late = LateComm(comm)
        flat = torch.full((400,), float(comm.rank))
        exchange().average(GradBucket({"w": flat.shape}, flat), late)
        return flat, late.batches

    return run_ranks(size, rank_main)


def end_one_by_one(batches: Sequence[Sequence[Batch]]) -> bool:
    """Return whether all batches end if each rank runs its own strictly one after the other."""
    waiting = [deque(mine) for mine in batches]
    moved = True
    while moved:
        moved = False
        for mine in waiting:
            while mine and not any(messages.total() for messages in mine[0]):
                mine.popleft()
                moved = True
        for rank, peer in permutations(range(len(waiting)), 2):
            if waiting[rank] and waiting[peer]:
                (sends, _), (_, receives) = waiting[rank][0], waiting[peer][0]
                count = min(sends[peer], receives[rank])
                sends[peer] -= count
                receives[rank] -= count
                moved = moved or count > 0
    return not any(waiting)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_transfers_under_way_are_left_alone_and_ranks_wait_in_no_circle(
    exchange: Callable[[], Exchange],
) -> None:
    for size in (1, 2, 3, 4, 5, 8, 13):
        results = average_late(exchange, size)
        for flat, _ in results:
            assert torch.equal(flat, torch.full_like(flat, (size - 1) / 2))
        assert end_one_by_one([batches for _, batches in results])


def test_a_circle_is_seen() -> None:
    def to(peer: int) -> Batch:
        return Counter([peer]), Counter()

    def by(peer: int) -> Batch:
        return Counter(), Counter([peer])

    assert end_one_by_one([[to(1), by(1)], [by(0), to(0)]])
    assert not end_one_by_one([[to(1), by(1)], [to(0), by(0)]])
