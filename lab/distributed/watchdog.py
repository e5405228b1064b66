"""Watchdog: a thread of each rank that nothing in training can block.

It ends a run whose exchange hangs, tells the other ranks when one fails, and lets all ranks agree
at which step to stop after a signal. It costs the training loop one lock per step: ranks
communicate through the launcher's key-value store, never by a collective.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from lab.distributed.worker import Worker
from lab.distributed.world import LIBRARY_MARGIN_S, World

POLL_S = 0.2
GRACE_S = 1.0  # for training to notice another rank's failure by itself
STUCK_S = 20.0  # after a signal, an exchange that takes longer hangs
# SLURM warns by SIGUSR1, a terminal that closes by SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
CONTROL_EXTRA_S = LIBRARY_MARGIN_S / 2  # for rank 0 to write files while the others wait
AGREE_S = 20.0  # for the ranks to agree at which step to stop


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
        """Let a signal stop training at the end of a step; a second SIGINT stops it at once."""
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
                raise RuntimeError("a rank was lost while the ranks agreed where to stop")
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
                failure = _read_failure(self._store)
            except dist.DistError as error:
                failure = Failure("failed", f"rank {self._rank} lost the launcher: {_first(error)}")
            except RuntimeError as error:  # from the device, when its events are queried
                failure = Failure("failed", f"rank {self._rank}: {_first(error)}")
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
                text = f"rank {self._rank} has heard nothing from the launcher for {limit_s:g} s"
                self._on_fatal(Failure("failed", f"{text}: the network is lost, or torchrun hangs"))

    def _read_signals(self) -> None:
        if self._signals is None:
            return
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._signals, 64):
                if number in STOP_SIGNALS and self.stop_signal is None:
                    self.stop_signal = signal.Signals(number).name

    def _spread_stop(self) -> None:
        self._read_signals()
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


def _read_failure(store: dist.Store) -> Failure | None:
    if not store.check(["failure"]):
        return None
    return Failure(**json.loads(store.get("failure")))


def _first(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
