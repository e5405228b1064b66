"""Jobs in turns: four ranks whose exchange has four stages, two levels of groups, never stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

from lab.distributed.worker import TurnsWorker

Stage = tuple[int, str, int]  # of a rank, a job and its stage, from 1
LIMIT_S = 20.0  # a test that stops waits so long
INSIDE, ACROSS = {0: 1, 1: 0, 2: 3, 3: 2}, {0: 3, 3: 0, 1: 2, 2: 1}
PEERS = (INSIDE, ACROSS, ACROSS, INSIDE)  # of stages 1 to 4


class Network:
    """Which stages have begun, and which of them are late to look complete."""

    def __init__(self) -> None:
        self.begun = {at: threading.Event() for at in product(range(4), "ij", range(1, 5))}
        self.late: set[Stage] = set()


class Pair:
    """A collective of two ranks, complete once both have begun it."""

    def __init__(self, network: Network, rank: int, job: str, stage: int) -> None:
        self.network, self.own = network, (rank, job, stage)
        self.peers = network.begun[PEERS[stage - 1][rank], job, stage]
        network.begun[self.own].set()

    def is_completed(self) -> bool:
        return self.peers.is_set() and self.own not in self.network.late

    def wait(self) -> None:
        if not self.peers.wait(LIMIT_S):
            raise TimeoutError(self.own)


def stages(network: Network, rank: int, job: str) -> Iterator[Pair]:
    for stage in range(1, 5):
        yield Pair(network, rank, job, stage)


def submit(worker: TurnsWorker, network: Network, rank: int, job: str) -> None:
    worker.submit(job, lambda: stages(network, rank, job))


def ended(workers: list[TurnsWorker]) -> list[BaseException]:
    """Let all ranks wait at once, and return their errors."""
    errors: list[BaseException] = []

    def wait(worker: TurnsWorker) -> None:
        try:
            worker.wait()
        except TimeoutError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_ranks_that_wait_at_different_stages_do_not_wait_in_a_circle() -> None:
    network, workers = Network(), [TurnsWorker() for _ in range(4)]
    everything = set(network.begun)
    network.late = everything
    for job, rank in product("ij", range(4)):
        submit(workers[rank], network, rank, job)
    network.late = set()
    for rank in (0, 2):  # both jobs go to stage 2
        workers[rank].advance()
    network.late = {(1, "j", 1), (3, "j", 1)}
    for rank in (1, 3, 1, 3):  # the first job goes to stage 3, the second does not seem complete
        workers[rank].advance()
    waiting: list[Any] = []
    early = threading.Thread(target=lambda: waiting.extend(ended([workers[0], workers[2]])))
    early.start()
    for rank in (0, 2):
        assert network.begun[rank, "i", 3].wait(LIMIT_S)
    for rank in (1, 3):  # and to stage 4
        workers[rank].advance()
        assert network.begun[rank, "i", 4].is_set()
        assert not network.begun[rank, "j", 2].is_set()
    assert ended([workers[1], workers[3]]) == []
    early.join()
    assert waiting == []
    assert all(event.is_set() for event in network.begun.values())


def test_no_job_begins_a_stage_before_an_earlier_one() -> None:
    network, worker = Network(), TurnsWorker()
    for rank, job, stage in network.begun:  # the other ranks are far ahead
        if rank != 0:
            network.begun[rank, job, stage].set()
    network.late = {(0, "i", 1)}
    for job in "ij":
        submit(worker, network, 0, job)
    worker.advance()
    assert not network.begun[0, "j", 2].is_set()
    network.late = {(0, "i", 2)}
    worker.advance()
    assert network.begun[0, "i", 2].is_set() and network.begun[0, "j", 2].is_set()
    worker.advance()
    assert not network.begun[0, "j", 3].is_set()


def test_waiting_for_all_but_the_last_waits_for_the_first_even_if_the_last_has_ended() -> None:
    network, worker, over = Network(), TurnsWorker(), list[str]()
    for event in network.begun.values():
        event.set()
    network.late = {(0, "i", 2)}

    def one(job: str, num_stages: int) -> Iterator[Pair]:
        for stage in range(1, num_stages + 1):
            yield Pair(network, 0, job, stage)
        over.append(job)

    worker.submit("i", lambda: one("i", 4))
    worker.submit("j", lambda: one("j", 1))
    worker.advance()
    assert over == ["j"]
    worker.wait(left=1)
    assert over == ["j", "i"]
