"""Workers run exchanges: in line, interleaved with backward, on a thread, or on a side stream.

Always first in, first out.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.distributed.collective import Collective

Job = Callable[[], Iterator[Collective]]  # yields what it begins; resumed when complete
Event = torch.cuda.Event | torch.Event


class Worker(ABC):
    """One FIFO of exchanges.

    Attributes:
        in_line: a job's own work keeps the caller, and so backward, from going on.
    """

    in_line = False

    @abstractmethod
    def submit(self, label: str, job: Job) -> None:
        """Run `job` after all jobs submitted before it. `label` names it in messages."""

    @abstractmethod
    def oldest(self) -> tuple[str, float] | None:
        """Return the job in flight and its seconds so far. Any thread may call this."""

    def advance(self) -> None:
        """Advance jobs as far as they need not wait. Called often, by the submitting thread."""

    def wait(self, left: int = 0) -> None:
        """Block until the results of all jobs but the last `left` may be used.

        Raises:
            Exception: the first error of a job.
        """

    def close(self) -> None:
        """Release threads and streams."""


class InlineWorker(Worker):
    """Runs each job where it is submitted: nothing overlaps."""

    in_line = True

    def __init__(self) -> None:
        self._current: tuple[str, float] | None = None

    def submit(self, label: str, job: Job) -> None:
        self._current = label, time.monotonic()
        for collective in job():
            collective.wait()
        self._current = None

    def oldest(self) -> tuple[str, float] | None:
        current = self._current
        return current and (current[0], time.monotonic() - current[1])


@dataclass
class _UnderWay:
    """A job that waits for a collective.

    Attributes:
        waits_for: that collective.
        job: its position among all jobs of the worker, from 1.
        number: position of this wait among all of the worker.
        stage: how many collectives the job has begun.
    """

    label: str
    stages: Iterator[Collective]
    waits_for: Collective
    job: int
    number: int
    stage: int = 1


class TurnsWorker(Worker):
    """Interleaves jobs with backward on one thread, while a library's threads communicate.

    A job resumes at the next call after its collective is complete. No job begins a stage before an
    earlier job has, so all ranks begin the same stage of all jobs in the same order, whatever their
    timing. A thread would have to be woken for each stage, and would compete with backward for a
    core.

    `wait` blocks for the oldest job alone. If ranks blocked for later ones too, one could wait for
    job 2 of a rank that waits for its job 1: exchanges of four stages stopped so. The rank whose
    oldest job is at the earliest stage of all never waits for a collective that others have yet to
    begin.
    """

    in_line = True

    def __init__(self) -> None:
        self._under_way: deque[_UnderWay] = deque()
        self._inline = InlineWorker()
        self._num_jobs = 0
        self._count = 0
        # Keeps a number, since keeping the collective would keep its tensor.
        self._head: tuple[int, float] = 0, 0.0  # the oldest wait, and since when

    def submit(self, label: str, job: Job) -> None:
        self.advance()
        self._num_jobs += 1

        def begin() -> Iterator[Collective]:
            stages = job()
            if (first := next(stages, None)) is not None:
                self._count += 1
                under_way = _UnderWay(label, stages, first, self._num_jobs, self._count)
                self._under_way.append(under_way)
            yield from ()

        self._inline.submit(label, begin)

    def advance(self) -> None:
        allowed = math.inf  # the stage that the job before is in; inf: there is none
        for job in tuple(self._under_way):
            if job.stage < allowed and job.waits_for.is_completed() and not self._go_on(job):
                continue
            allowed = job.stage

    def oldest(self) -> tuple[str, float] | None:
        for job in tuple(self._under_way):
            number = job.number
            if not job.waits_for.is_completed():
                if self._head[0] != number:
                    self._head = number, time.monotonic()
                return job.label, time.monotonic() - self._head[1]
        return self._inline.oldest()

    def wait(self, left: int = 0) -> None:
        while self._under_way and self._under_way[0].job <= self._num_jobs - left:
            self._go_on(self._under_way[0])
            self.advance()

    def _go_on(self, job: _UnderWay) -> bool:
        """Begin the job's next stage, and return whether there is one."""
        job.waits_for.wait()
        if (following := next(job.stages, None)) is None:
            self._under_way.remove(job)
            return False
        self._count += 1
        job.waits_for, job.number, job.stage = following, self._count, job.stage + 1
        return True


class ThreadWorker(Worker):
    """Runs jobs on one thread, for libraries that block the host (Gloo, Horovod).

    After an error later jobs are dropped, and `wait` raises it. With CUDA tensors a job first
    synchronises with the submitting stream, and ends when the device has finished.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inline = InlineWorker()
        self._jobs: queue.SimpleQueue[tuple[str, Job] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unfinished = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def submit(self, label: str, job: Job) -> None:
        if self._device.type == "cuda":
            job = _after(torch.cuda.current_stream(self._device).record_event(), job)
        with self._idle:
            self._unfinished += 1
        self._jobs.put((label, job))

    def oldest(self) -> tuple[str, float] | None:
        return self._inline.oldest()

    def wait(self, left: int = 0) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._unfinished <= left)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread starts on GPU 0
        while (entry := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    self._inline.submit(*entry)
            except BaseException as error:
                self._error = error
            with self._idle:
                self._unfinished -= 1
                self._idle.notify_all()


def _after(ready: Event, job: Job) -> Job:
    def run() -> Iterator[Collective]:
        ready.synchronize()
        yield from job()
        torch.cuda.current_stream().synchronize()

    return run


class StreamWorker(Worker):
    """Queues jobs on a side CUDA stream, for NCCL: nothing blocks the host.

    The stream has high priority: a codec's kernels are short and later buckets wait for them, so
    they should run before backward's kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._queued: deque[tuple[str, Event]] = deque()
        self._head_since = 0.0  # the host may queue a job long before it runs

    def submit(self, label: str, job: Job) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for collective in job():
                collective.wait()
            if not self._queued:
                self._head_since = time.monotonic()
            self._queued.append((label, self._stream.record_event()))

    def oldest(self) -> tuple[str, float] | None:
        while self._queued and self._queued[0][1].query():
            self._queued.popleft()
            self._head_since = time.monotonic()
        if not self._queued:
            return None
        return self._queued[0][0], time.monotonic() - self._head_since

    def wait(self, left: int = 0) -> None:
        if len(self._queued) > left:  # else the device has finished the others
            torch.cuda.current_stream(self._device).wait_event(self._queued[-1 - left][1])


def make_worker(overlap: bool, device: torch.device, backend: str, asynchronous: bool) -> Worker:
    """Choose the worker for `backend`, with or without overlap.

    NCCL never blocks the host, so it always takes the stream: without overlap jobs are submitted
    later.

    Args:
        asynchronous: jobs yield their collectives and never block.
    """
    if backend == "nccl":
        return StreamWorker(device)
    if not overlap:
        return InlineWorker()
    return TurnsWorker() if asynchronous else ThreadWorker(device)


def record_stream(kept: Tensor) -> Tensor:
    """Return `kept`, whose memory stays until the current stream has read it.

    Exchanges run on a side stream, but a tensor from a checkpoint or a rollback was allocated on
    the main one, which would otherwise reuse its memory before the side stream has read it.
    """
    if kept.is_cuda:
        kept.record_stream(torch.cuda.current_stream(kept.device))
    return kept


class HostCopy:
    """A small tensor on its way to the host: begun now and read later, so that no host waits.

    From a GPU it travels into pinned memory, behind what the current stream has queued.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        on_gpu = tensor.device.type == "cuda"
        self._ready = torch.cuda.current_stream(tensor.device).record_event() if on_gpu else None

    def has_arrived(self) -> bool:
        """Return whether `read` would return at once."""
        return self._ready is None or self._ready.query()

    def read(self) -> Tensor:
        """Return the tensor on the host, once the device has computed it."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._copy
