"""Emulate a straggler: halt a host's ranks for a part of every few milliseconds.

Timers and the kernel's side of connections continue meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

RUN_S = 0.01  # seconds between two halts: shorter than a step, longer than a halt's cost


def slow_down(launcher: subprocess.Popen[str], factor: float) -> None:
    """Let the processes of `launcher` run for 1/factor of the time, until it ends."""
    while launcher.poll() is None:
        began = time.monotonic()
        time.sleep(RUN_S)
        halt_s = (factor - 1) * (time.monotonic() - began)
        ranks = list(descendants(launcher.pid))
        _send(ranks, signal.SIGSTOP)
        time.sleep(halt_s)
        _send(ranks, signal.SIGCONT)


def descendants(pid: int) -> Iterator[int]:
    """Return all descendants of a process (children of main threads)."""
    with contextlib.suppress(OSError):  # it has ended
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from descendants(child)


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
