"""Where exchanges run: in line, on a thread, the library's threads, or a side stream.

Always first in, first out.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from lab.distributed.comm import Collective

Job = Callable[[], Collective | None]  # what it began, if that is not yet done
Event = torch.cuda.Event | torch.Event


class Worker(ABC):
    """One FIFO of exchanges."""

    @abstractmethod
    def submit(self, label: str, job: Job) -> None:
        """Run `job` after all jobs submitted before it. `label` says what it is, for people."""

    @abstractmethod
    def oldest(self) -> tuple[str, float] | None:
        """The job under way: its label, and for how many seconds. May be asked from any thread."""

    def wait(self) -> None:
        """Return when the caller may use what the jobs produced; raise the first job's error."""

    def close(self) -> None:
        """Give back what the worker holds."""


class InlineWorker(Worker):
    """Runs each job where it is submitted: nothing overlaps."""

    def __init__(self) -> None:
        self._current: tuple[str, float] | None = None

    def submit(self, label: str, job: Job) -> None:
        self._current = label, time.monotonic()
        if (collective := job()) is not None:
            collective.wait()
        self._current = None

    def oldest(self) -> tuple[str, float] | None:
        current = self._current
        return current and (current[0], time.monotonic() - current[1])


class LibraryWorker(Worker):
    """Begins each job where it is submitted; the library goes on with it on threads of its own.

    For jobs that do nothing else: a thread of ours between the library's and the caller would have
    to be woken twice for each.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, str, Collective]] = deque()
        self._inline = InlineWorker()
        self._count = 0
        # By number: a collective that is kept keeps its tensor.
        self._head: tuple[int, float] = 0, 0.0  # the first under way, and since when it is

    def submit(self, label: str, job: Job) -> None:
        def begin() -> None:
            if (collective := job()) is not None:
                self._count += 1
                self._under_way.append((self._count, label, collective))

        self._inline.submit(label, begin)

    def oldest(self) -> tuple[str, float] | None:
        for number, label, collective in tuple(self._under_way):
            if not collective.is_completed():
                if self._head[0] != number:
                    self._head = number, time.monotonic()
                return label, time.monotonic() - self._head[1]
        return self._inline.oldest()

    def wait(self) -> None:
        while self._under_way:
            self._under_way[0][2].wait()
            self._under_way.popleft()


class ThreadWorker(Worker):
    """Runs jobs on one thread, for libraries that block the host (Gloo, Horovod).

    After an error the jobs behind it are dropped, and `wait` raises it. With CUDA tensors each job
    first waits for what was queued on the submitting stream, and ends when the device has.
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

    def wait(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._unfinished == 0)
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
    def run() -> None:
        ready.synchronize()
        if (collective := job()) is not None:
            collective.wait()
        torch.cuda.current_stream().synchronize()

    return run


class StreamWorker(Worker):
    """Queues jobs on a side CUDA stream, for NCCL: nothing blocks the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._queued: deque[tuple[str, Event]] = deque()
        self._head_since = 0.0  # the host may queue a job long before its turn comes

    def submit(self, label: str, job: Job) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            job()
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

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def make_worker(overlap: bool, device: torch.device, backend: str, asynchronous: bool) -> Worker:
    """The worker that lets exchanges over `backend` overlap backward, or the one that does not.

    NCCL never blocks the host, so it always has the stream: only the moment of submission differs.

    Args:
        asynchronous: jobs return at once what they began.
    """
    if backend == "nccl":
        return StreamWorker(device)
    if not overlap:
        return InlineWorker()
    return LibraryWorker() if asynchronous else ThreadWorker(device)
