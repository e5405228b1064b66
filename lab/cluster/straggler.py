"""Emulate a straggler: halt a host's ranks, or delay one phase of one rank's steps.

A host's ranks are halted for a part of every few milliseconds; timers and the kernel's side of
connections continue meanwhile. A rank is delayed by lab.training.trainer.Delay.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lab.settings import checks
from lab.settings.config import ConfigError, build

if TYPE_CHECKING:
    from omegaconf import DictConfig

PHASES = ("input", "forward", "backward", "exchange", "update")
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


@dataclass(frozen=True)
class Straggler:
    """A rank that is delayed on purpose.

    Attributes:
        phase: of its steps, one of PHASES.
        every: it is delayed in every so many steps.
    """

    rank: int
    phase: str
    delay_s: float
    every: int = 1

    def describe(self) -> str:
        """Describe the delay for a record."""
        often = "every step" if self.every == 1 else f"every {self.every} steps"
        return f"rank {self.rank} delayed by {1e3 * self.delay_s:g} ms in {self.phase}, {often}"


def straggler_of(config: DictConfig, world_size: int) -> Straggler | None:
    """Return the straggler that a run's settings ask for, if any.

    Raises:
        ConfigError: a wrong setting, or a rank that the run does not have.
    """
    if "_target_" not in config.get("straggler", {}):  # a loop of one's own has none
        return None
    found: Straggler = build(config.straggler)
    if found.rank >= world_size:
        raise ConfigError(f"straggler.rank={found.rank}: the ranks are 0 to {world_size - 1}")
    return found


def planted(rank: int, phase: str, delay_ms: float, every: int) -> Straggler:
    """Build a Straggler from conf/straggler/planted.yaml.

    Raises:
        ValueError: names the wrong setting, its value and what is allowed.
    """
    checks.whole("straggler.rank", rank, 0)
    checks.whole("straggler.every", every, 1)
    checks.one_of("straggler.phase", phase, PHASES)
    checks.number("straggler.delay_ms", delay_ms, above=0, at_most=60_000)
    return Straggler(rank, phase, delay_ms / 1e3, every)
