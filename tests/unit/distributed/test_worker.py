"""Workers on CPUs and GPUs, and the watchdog of their exchanges."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lab.distributed import worker
from lab.distributed.comm import Comm, run_ranks
from lab.distributed.worker import Failure, StreamWorker, TurnsWorker, Watchdog
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import OneBit, TopK
from lab.exchange.memory import Owned
from tests.support import HANG_S
from tests.support.worlds import one_of

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


def test_waiting_for_all_but_the_last_waits_for_the_first_even_if_the_last_has_ended() -> None:
    network, worker, over = Network(), TurnsWorker(), list[str]()
    for event in network.begun.values():
        event.set()

    def one(job: str, num_stages: int) -> Iterator[Pair]:
        for stage in range(1, num_stages + 1):
            yield Pair(network, 0, job, stage)
        over.append(job)

    worker.submit("i", lambda: one("i", 4))
    worker.submit("j", lambda: one("j", 1))
    assert worker.oldest() is None  # both could go on
    network.late = {(0, "i", 2)}
    worker.advance()
    assert over == ["j"] and (worker.oldest() or ("",))[0] == "i"
    worker.wait(left=1)
    assert over == ["j", "i"] and worker.oldest() is None


def test_a_job_never_overtakes_an_earlier_one() -> None:
    network, worker = Network(), TurnsWorker()
    network.late = {(0, "i", 1)}
    for (rank, *_), event in network.begun.items():
        if rank:
            event.set()
    for job in "ij":
        submit(worker, network, 0, job)
    worker.advance()
    assert not network.begun[0, "j", 2].is_set()
    network.late = set()
    worker.advance()
    assert network.begun[0, "j", 2].is_set()


class Noted:
    """Failures that a watchdog takes for fatal."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.found = threading.Event()

    def __call__(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.found.set()


def test_a_wait_outside_any_exchange_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost rank may be noticed outside an exchange, such as in a checkpoint's barrier."""
    monkeypatch.setattr(worker, "POLL_S", 0.01)
    monkeypatch.setattr(worker, "CONTROL_EXTRA_S", 0.0)
    noted, world = Noted(), one_of(2)
    watch = Watchdog(world, 0.1, noted)
    with world.waits.of("a barrier"):
        assert noted.found.wait(HANG_S)
    watch.close()
    text = "exchange_timeout_s=0.1: rank 0 waits in a barrier at step -1; rank 1 is lost"
    assert set(noted.failures) == {Failure("timeout", text)}


class Silent(dist.HashStore):
    """A store beyond a network that is lost: it answers nothing, not even with an error."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()

    def clone(self) -> Silent:
        return self

    def check(self, keys: list[str]) -> bool:
        self.back.wait(HANG_S)
        return False


def test_a_store_that_no_longer_answers_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "POLL_S", 0.01)
    monkeypatch.setattr(worker, "LIBRARY_MARGIN_S", 0.1)
    noted, store = Noted(), Silent()
    watch = Watchdog(dataclasses.replace(one_of(2), store=store), 0.1, noted)
    assert noted.found.wait(HANG_S)
    store.back.set()
    watch.close()
    assert "rank 0 has received nothing from the launcher for 0.2 s" in noted.failures[0].error


GPU_3 = torch.device("cuda", 3)


@pytest.mark.parametrize(("device", "expected"), [(GPU_3, [GPU_3]), (torch.device("cpu"), [])])
def test_the_watchdog_is_on_its_ranks_gpu_before_it_asks_anything(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, expected: list[torch.device]
) -> None:
    set_on: list[tuple[str, torch.device]] = []

    def note(device: torch.device) -> None:
        set_on.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", note)
    Watchdog(one_of(1, device), 60.0, lambda failure: None).close()
    assert set_on == [("watchdog", each) for each in expected]


class OnGPU(Tensor):
    """A tensor that claims to be on a GPU, and records the streams that keep its memory."""

    is_cuda = True  # type: ignore[assignment]
    kept_for: list[Any]

    def record_stream(self, s: Any) -> None:
        self.kept_for.append(s)


def test_a_flushed_residual_stays_until_the_side_stream_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"side stream of {device}")
    residuals = [torch.ones(64).as_subclass(OnGPU) for _ in range(3)]
    for residual in residuals:
        residual.kept_for = []
    top_k, one_bit = TopK(ratio=0.5), OneBit()
    top_k.memory._own["w"], one_bit.memory._own["w"] = residuals[:2]
    one_bit.memory._owned["w"] = Owned(0, residuals[2])

    def flush(comm: Comm) -> Tensor:
        bucket = GradBucket({"w": torch.Size((1, 64))}, torch.zeros(64))
        top_k.flush_residual(bucket, comm)
        one_bit.flush_residual(bucket, comm)
        return bucket.flat

    (flat,) = run_ranks(1, flush)
    assert flat.tolist() == [3.0] * 64
    assert not [*top_k.memory.residuals(), *one_bit.memory.residuals()]
    assert [residual.kept_for for residual in residuals] == [["side stream of cpu"]] * 3


class Stream:
    """A CUDA stream whose events nobody may ask about while it is captured."""

    def __init__(self) -> None:
        self.is_captured = False
        self.waited_for: list[Any] = []

    def wait_stream(self, _other: Stream) -> None: ...

    def wait_event(self, event: Any) -> None:
        self.waited_for.append(event)

    def record_event(self) -> Any:
        def query(captured: bool = self.is_captured) -> bool:
            assert not captured, "the capture would end here"
            return False

        return SimpleNamespace(query=query)


def test_nobody_asks_about_jobs_that_a_graph_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    side, main = Stream(), Stream()
    streams = [main]
    urgent = {(GPU_3, -1): side}  # exchanges have a stream of high priority
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: urgent[device, priority])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[-1])

    @contextmanager
    def queued_on(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "stream", queued_on)
    one = StreamWorker(GPU_3)
    side.is_captured = True
    with one.captured():
        one.submit("captured", lambda: iter(()))
        assert one.oldest() is None
        one.wait()
        assert len(main.waited_for) == 1  # the graph has both streams
    side.is_captured = False
    assert one.oldest() is None
    one.watch_stream("a replay")
    oldest = one.oldest()
    assert oldest and oldest[0] == "a replay"


def test_a_job_that_ends_while_others_are_counted_is_waited_for_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ending(deque[Any]):
        """The watchdog's thread removes a job as soon as this one has counted the jobs."""

        def __len__(self) -> int:
            count = super().__len__()
            self.clear()
            return count

    main = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: main)
    one = StreamWorker(GPU_3)
    one._queued = Ending([("a job", main.record_event())])
    one.wait()
    one._queued.clear()
    one.wait()
    assert len(main.waited_for) <= 1
