"""Workers run exchanges; a watchdog ends a run whose exchange hangs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lab.distributed.comm import Collective
from lab.distributed.launcher import in_main_thread
from lab.distributed.torch_comm import first_line
from lab.distributed.world import LIBRARY_MARGIN_S, World

Job = Callable[[], Iterator[Collective]]  # yields what it begins; resumed when complete
Event = torch.cuda.Event | torch.Event
POLL_S = 0.2
GRACE_S = 1.0  # for training to notice another rank's failure by itself
STUCK_S = 20.0  # after a signal, an exchange that takes longer hangs
# SLURM warns by SIGUSR1, a terminal that closes by SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
CONTROL_EXTRA_S = LIBRARY_MARGIN_S / 2  # for rank 0 to write files while the others wait
AGREE_S = 20.0  # for the ranks to agree at which step to stop


class Worker(ABC):
    """One FIFO of exchanges.

    Attributes:
        in_line: a job's own work keeps the caller, and so backward, from going on.
        takes_turns: jobs go on in `advance` alone; elsewhere it does nothing.
    """

    in_line = False
    takes_turns = False

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

    def captured(self) -> AbstractContextManager[None]:
        """Enclose jobs that a graph captures and which do not run: nothing watches them."""
        return contextlib.nullcontext()

    def watch_stream(self, label: str) -> None:
        """Count all that the current stream has queued, named `label`, as a job in flight."""

    def close(self) -> None:
        """Release threads and streams."""


class InlineWorker(Worker):
    """Runs each job where it is submitted: nothing overlaps."""

    in_line = True

    def __init__(self) -> None:
        self._current: tuple[str, float] | None = None

    def submit(self, label: str, job: Job) -> None:
        self._current = label, time.monotonic()  # a context would cost as much as the rest
        for collective in job():
            collective.wait()
        self._current = None

    def oldest(self) -> tuple[str, float] | None:
        current = self._current
        return current and (current[0], time.monotonic() - current[1])


@dataclass
class _Waiting:
    """A job that waits for a collective."""

    label: str
    stages: Iterator[Collective]
    waits_for: Collective
    job: int  # its position among all jobs of the worker, from 1
    stage: int = 1  # how many collectives it has begun


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
    takes_turns = True

    def __init__(self) -> None:
        self._under_way: deque[_Waiting] = deque()
        self._inline = InlineWorker()
        self._num_jobs = 0
        # Keeps numbers, since keeping the collective would keep its tensor.
        self._head = (0, 0), 0.0  # job and stage of the oldest wait, and since when

    def submit(self, label: str, job: Job) -> None:
        self.advance()
        self._num_jobs += 1

        def begin() -> Iterator[Collective]:
            stages = job()
            if (first := next(stages, None)) is not None:
                self._under_way.append(_Waiting(label, stages, first, self._num_jobs))
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
            place = job.job, job.stage
            if not job.waits_for.is_completed():
                if self._head[0] != place:
                    self._head = place, time.monotonic()
                return job.label, time.monotonic() - self._head[1]
        return self._inline.oldest()

    def wait(self, left: int = 0) -> None:
        while self._under_way and self._under_way[0].job <= self._num_jobs - left:
            self._go_on(self._under_way[0])
            self.advance()

    def _go_on(self, job: _Waiting) -> bool:
        job.waits_for.wait()
        if (following := next(job.stages, None)) is None:
            self._under_way.remove(job)
            return False
        job.waits_for, job.stage = following, job.stage + 1
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
            ready = torch.cuda.current_stream(self._device).record_event()
            job = partial(self._between_streams, ready, job)
        with self._idle:
            self._unfinished += 1
        self._jobs.put((label, job))

    @staticmethod
    def _between_streams(ready: Event, job: Job) -> Iterator[Collective]:
        ready.synchronize()
        yield from job()
        torch.cuda.current_stream().synchronize()

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
            del entry  # it holds the model
            with self._idle:
                self._unfinished -= 1
                self._idle.notify_all()


class StreamWorker(Worker):
    """Queues jobs on a side CUDA stream, for NCCL: nothing blocks the host.

    The stream has high priority: a codec's kernels are short and later buckets wait for them, so
    they should run before backward's kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._queued: deque[tuple[str, Event]] = deque()
        self._watched = self._queued  # by another thread
        self._head_since = 0.0  # the host may queue a job long before it runs

    def submit(self, label: str, job: Job) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for collective in job():
                collective.wait()
            self.watch_stream(label)

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        # Nobody may ask a captured event whether it has passed: that would end the capture.
        self._queued = deque()
        try:
            yield
        finally:
            self._queued = self._watched

    def watch_stream(self, label: str) -> None:
        if not self._queued:
            self._head_since = time.monotonic()
        event = torch.cuda.current_stream(self._device).record_event()
        self._queued.append((label, event))

    def oldest(self) -> tuple[str, float] | None:
        while self._watched and self._watched[0][1].query():
            self._watched.popleft()
            self._head_since = time.monotonic()
        if not self._watched:
            return None
        return self._watched[0][0], time.monotonic() - self._head_since

    def wait(self, left: int = 0) -> None:
        try:
            _, ended = self._queued[-1 - left]
        except IndexError:  # the watchdog's thread has seen the device finish the others
            return
        torch.cuda.current_stream(self._device).wait_event(ended)


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
        self._copy = tensor.to("cpu", non_blocking=True, copy=True)
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


@dataclass(frozen=True)
class Failure:
    """Why a run ended early: `status` as in record.json, and one line.

    Attributes:
        traceback: text, from the first frame of the user's code on; None: none of it failed.
    """

    status: str
    error: str
    traceback: str | None = None


class Watchdog:
    """One rank's watchdog. Call `close` before leaving the process group.

    Args:
        world: this rank among the others.
        timeout_s: longest time that an exchange may take; a control message, CONTROL_EXTRA_S more.
        on_fatal: called on the watchdog's thread when training cannot go on; writes the record and
            ends the process.
    """

    def __init__(self, world: World, timeout_s: float, on_fatal: Callable[[Failure], None]) -> None:
        self._main_store = store = world.store
        # A store's client must not be shared between threads. (torch's stubs lack clone.)
        self._store: dist.PrefixStore = store.clone()  # type: ignore[attr-defined]
        self._rank, self._size, self._device = world.rank, world.size, world.device
        self._waits = world.waits
        self._timeout_s = timeout_s
        self._on_fatal = on_fatal
        self.worker: Worker | None = None
        self.stop_signal: str | None = None
        self._signals: int | None = None  # a pipe's end
        self._lock = threading.Lock()
        self._steps_begun = 0
        self._stopping = False
        self._stopping_since = math.inf
        self._closed = threading.Event()
        self._polls = 0  # that the store has answered
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        threading.Thread(target=self._look_for_silence, name="store", daemon=True).start()

    def listen_to_signals(self) -> None:
        """Let a signal stop training at the end of a step; a second SIGINT stops it at once.

        Outside the main thread signals belong to the process's owner, and nothing changes.
        """
        if not in_main_thread():
            return
        interrupts = 0

        def on_signal(number: int, _frame: object) -> None:
            nonlocal interrupts
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                raise KeyboardInterrupt

        # A handler runs only when the main thread runs Python code, and that may hang in a library.
        # So the watchdog's thread reads signals from the wake-up pipe.
        self._signals, write_end = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        # nohup has SIGHUP ignored. A torchrun does not care, and ends its ranks by it all the same.
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        stays_ignored = is_ignored and "TORCHELASTIC_RUN_ID" not in os.environ
        for number in STOP_SIGNALS:  # last: from now on a signal only fills the pipe
            if number != signal.SIGHUP or not stays_ignored:
                signal.signal(number, on_signal)

    def begin_step(self) -> bool:
        """Return whether to run another step; after a signal, all ranks stop at the same step.

        Ranks may be at different steps when the signal comes. Each posts the number of steps it
        has begun, and all stop after the largest: a step that one rank began needs all ranks.
        """
        with self._lock:
            if not self._stopping:
                self._steps_begun += 1
                return True
        if self._steps_begun < self._last_step():
            self._steps_begun += 1
            return True
        return False

    def publish(self, failure: Failure) -> Failure:
        """Tell all ranks why this one fails; return the first failure that any rank published.

        If the store is gone with the process that held it, return `failure`.
        """
        try:
            return _publish(self._main_store, failure)
        except dist.DistError:
            return failure

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()
        if self._signals is not None:
            os.close(signal.set_wakeup_fd(-1))
            os.close(self._signals)
            self._signals = None

    def _last_step(self) -> int:
        deadline = time.monotonic() + AGREE_S
        keys = [f"begun/{rank}" for rank in range(self._size)]
        while not self._main_store.check(keys):
            if time.monotonic() > deadline or self._main_store.check(["failure"]):
                raise RuntimeError("a rank was lost while the ranks were agreeing on where to stop")
            time.sleep(POLL_S / 10)
        return max(int(self._main_store.get(key)) for key in keys)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread is on GPU 0 and would allocate there
        failed_at: float | None = None
        while not self._closed.wait(POLL_S):
            try:
                self._spread_stop()
                self._answer_roll_call()
                self._look_for_hang()
                failure = None
                if self._store.check(["failure"]):
                    failure = Failure(**json.loads(self._store.get("failure")))
            except dist.DistError as error:
                failure = Failure(
                    "failed",
                    f"rank {self._rank} lost its connection to the launcher: {first_line(error)}",
                )
            except RuntimeError as error:  # from the device, when its events are queried
                failure = Failure("failed", f"rank {self._rank}: {first_line(error)}")
            self._polls += 1
            if failure is not None:
                failed_at = failed_at or time.monotonic()
                if failure.status == "timeout" or time.monotonic() - failed_at > GRACE_S:
                    self._on_fatal(failure)

    def _look_for_silence(self) -> None:
        """End the run when neither the store nor training goes on: a lost network tells nobody.

        A question to the store has no limit of its own. This counts its own rounds, not seconds:
        a process that was stopped for long has heard nothing for long.
        """
        limit_s = self._timeout_s + LIBRARY_MARGIN_S
        seen, rounds = (0, 0), 0
        while not self._closed.wait(POLL_S):
            now = self._polls, self._steps_begun
            seen, rounds = now, rounds + 1 if now == seen else 0
            if rounds * POLL_S > limit_s:
                text = f"rank {self._rank} has received nothing from the launcher for {limit_s:g} s"
                self._on_fatal(Failure("failed", f"{text}: the network is down, or torchrun hangs"))

    def _spread_stop(self) -> None:
        if self._signals is not None:
            with contextlib.suppress(BlockingIOError):
                for number in os.read(self._signals, 64):
                    if number in STOP_SIGNALS and self.stop_signal is None:
                        self.stop_signal = signal.Signals(number).name
        if self._stopping:
            return
        if self.stop_signal is not None:
            self._store.set("stop", self.stop_signal)
        elif self._store.check(["stop"]):
            self.stop_signal = self._store.get("stop").decode()
        else:
            return
        with self._lock:
            self._stopping = True
            self._stopping_since = time.monotonic()
            self._store.set(f"begun/{self._rank}", str(self._steps_begun))

    def _look_for_hang(self) -> None:
        current = self.worker and self.worker.oldest()
        if current and min(current[1], time.monotonic() - self._stopping_since) > STUCK_S:
            text = f"stopped by {self.stop_signal} while {self._doing()}"
            _publish(self._store, Failure("interrupted", text))
        control = self._waits.current()
        hangs = current and current[1] > self._timeout_s
        if not hangs and not (control and control[1] > self._timeout_s + CONTROL_EXTRA_S):
            return
        self._store.set("roll call", "")
        self._answer_roll_call()
        time.sleep(5 * POLL_S)  # the others answer at their next poll
        others = [self._answer_of(rank) for rank in range(self._size) if rank != self._rank]
        text = f"exchange_timeout_s={self._timeout_s:g}: {self._doing()}; {'; '.join(others)}"
        _publish(self._store, Failure("timeout", text))

    def _answer_roll_call(self) -> None:
        if self._store.check(["roll call"]):
            self._store.set(f"doing/{self._rank}", self._doing())

    def _answer_of(self, rank: int) -> str:
        key = f"doing/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else f"rank {rank} is lost"

    def _doing(self) -> str:
        current = (self.worker and self.worker.oldest()) or self._waits.current()
        state = f"waits in {current[0]}" if current else "is outside any exchange"
        return f"rank {self._rank} {state} at step {self._steps_begun - 1}"


def _publish(store: dist.Store, failure: Failure) -> Failure:
    return Failure(**json.loads(store.compare_set("failure", "", json.dumps(asdict(failure)))))
