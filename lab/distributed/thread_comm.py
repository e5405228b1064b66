"""Comm among threads of one process: any exchange, any number of ranks, no network."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.distributed.collective import Done, Handle
from lab.distributed.comm import Comm, Transfer
from lab.distributed.nodes import Nodes

TIMEOUT_S = 30.0  # longest wait for another rank


class _Meeting:
    """Shared state of the ranks: a barrier, a slot each, a mailbox for each pair, and parts."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.mail = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
        self.parts: dict[tuple[int, int], _Meeting] = {}  # by number of the split and by color


class Expected(list[tuple[Tensor, queue.SimpleQueue]]):
    """Receives in flight: each tensor with the mailbox that its values come from."""

    def wait(self) -> None:
        for tensor, mailbox in self:
            tensor.copy_(mailbox.get(timeout=TIMEOUT_S))


class ThreadComm(Comm):
    """One rank among `size` threads, made by `run_ranks`. Sums add in rank order."""

    backend = "threads"

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size)
        self.meeting = meeting
        self._num_splits = 0

    def _everyones(self, tensor: Tensor) -> list[Tensor]:
        self.meeting.slots[self.rank] = tensor.clone()
        self.meeting.barrier.wait()
        tensors = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return tensors

    def _iall_reduce(self, tensor: Tensor) -> Done:
        first, *others = self._everyones(tensor)
        tensor.copy_(first)
        for other in others:
            tensor += other
        return Done()

    def _iall_gather(self, output: Tensor, tensor: Tensor) -> Done:
        output.copy_(torch.stack(self._everyones(tensor)).view_as(output))
        return Done()

    def _iall_to_all(self, output: Tensor, tensor: Tensor) -> Done:
        output.copy_(torch.stack([sent[self.rank] for sent in self._everyones(tensor)]))
        return Done()

    def _ibroadcast(self, tensor: Tensor, source: int) -> Done:
        tensor.copy_(self._everyones(tensor)[source])
        return Done()

    def _isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Handle:
        for tensor, to in sends:
            self.meeting.mail[self.rank, to].put(tensor.clone())
        mail = self.meeting.mail
        return Expected((tensor, mail[source, self.rank]) for tensor, source in receives)

    def _split(self, color: int) -> tuple[ThreadComm, list[int]]:
        colors = [int(other) for other in self._everyones(torch.tensor(color))]
        members = [rank for rank, other in enumerate(colors) if other == color]
        self._num_splits += 1
        key = self._num_splits, color
        meeting = self.meeting.parts.setdefault(key, _Meeting(len(members)))  # atomic
        return ThreadComm(members.index(self.rank), len(members), meeting), members


def run_ranks(size: int, rank_main: Callable[[Comm], Any], nodes: Nodes | None = None) -> list[Any]:
    """Run `rank_main(comm)` as `size` ranks, one thread each; return their results in rank order.

    Args:
        nodes: the ranks of each node to play; None: each has its own.

    Raises:
        Exception: the first rank's error, once every rank has stopped.
    """
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def target(rank: int) -> None:
        comm = ThreadComm(rank, size, meeting)
        comm.nodes = nodes or comm.nodes
        try:
            results[rank] = rank_main(comm)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=target, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
