"""Signals to any process of a run at a random moment; then the same command until it is done.

What a run leaves in the end must be what an undisturbed one leaves: weights, residuals, optimizer.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.attack.launchers import FORKING, LAUNCHERS, missing
from tests.attack.outcome import SURVIVED, Attempt
from tests.attack.victim import Victim, difference, end, litter, outlive, processes, tail
from tests.support import HANG_S, rank_server, slurm
from tests.support.cases import BY_THE_CLOCK, STRATEGIES

SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGUSR1")
STARTS = 4
# Not equal in bits after a resume: what decides by the clock, and what has other buckets or
# reductions then (docs/reliability.md).
UNEQUAL = (*BY_THE_CLOCK, "ddp", "priority", "fsdp", "hsdp", "zeropp")
ALL = [strategy for strategy in STRATEGIES if strategy not in UNEQUAL]
OVER_HOROVOD = ("overlap", "onebit", "topk", "powersgd", "int8")


def attack(seed: int, count: int, folder: Path, launchers: tuple[str, ...]) -> Iterator[Attempt]:
    """Disturb `count` runs, and yield what came of each.

    Args:
        launchers: by which they are started, in turns.
    """
    folder = folder.resolve()
    whole: dict[tuple[Any, ...], tuple[Any, float]] = {}
    with ExitStack() as stack:
        variables = _variables(folder, launchers, stack)
        for number in range(count):
            chance = random.Random(f"kills {seed} {number}")
            launcher, size = launchers[number % len(launchers)], chance.choice((1, 2, 3, 4))
            among = OVER_HOROVOD if launcher == "Horovod" else ALL
            strategy = among[(seed + number) % len(among)]
            # Each fourth run may be killed as it imports torch.
            own = variables[launcher] if launcher not in FORKING or number % 4 else {}
            key = strategy, size, launcher, bool(own)
            if key not in whole:
                alone = folder / "-".join(map(str, key))
                whole[key] = undisturbed(Victim(strategy, size, alone, launcher, own))
            victim = Victim(strategy, size, folder / f"{number}", launcher, own)
            yield disturbed(victim, chance, *whole[key])


def here() -> tuple[str, ...]:
    """Return the launchers that this machine has: torchrun as often as all others."""
    others = [name for name in LAUNCHERS if name != "torchrun" and name not in missing()]
    return tuple(name for other in others for name in ("torchrun", other)) or ("torchrun",)


def undisturbed(victim: Victim) -> tuple[Any, float]:
    """Run to the end, however busy the machine; return what it leaves, and the seconds it took."""
    began = time.monotonic()
    code = replace(victim, limit_s=HANG_S).start().wait(HANG_S)
    assert code == 0, (victim.folder / "output").read_text()[-3000:]
    return victim.left(), time.monotonic() - began


def disturbed(victim: Victim, chance: random.Random, expected: Any, took_s: float) -> Attempt:
    """Send a signal, start again until the run is done, and compare what it leaves."""
    name, after_s = chance.choice(SIGNALS), chance.uniform(0.0, 1.05 * took_s)
    process, began = victim.start(), time.monotonic()
    time.sleep(after_s)
    target = send(name, victim, chance)
    how = f"{victim.strategy} n={victim.size} by {victim.launcher}"
    attempt = Attempt(f"kill: {name}", f"{how}, after {after_s:.2f} s, process {target}", SURVIVED)
    try:
        codes = [process.wait(HANG_S)]
        while not victim.is_done() and len(codes) < STARTS:
            outlive(victim.folder)
            codes.append(victim.start().wait(HANG_S))
    except subprocess.TimeoutExpired:
        return replace(attempt, outcome="hung", said=tail(victim.folder))
    else:
        lost_s = max(0.0, time.monotonic() - began - took_s)
        if wrong := what_is_wrong(victim, expected):
            return replace(attempt, outcome="lost", said=f"codes {codes}: {wrong}")
        return replace(attempt, said=f"{lost_s:.1f}")
    finally:
        end(victim.folder)


def send(name: str, victim: Victim, chance: random.Random) -> int | None:
    """Send a signal to one of a run's processes; return which, or None if all have ended."""
    pids = processes(victim.folder)
    if victim.launcher == "SLURM":
        pids = pids[1:]  # the first one only waits for the job
    if not pids:
        return None
    target = chance.randrange(len(pids))
    with suppress(ProcessLookupError):
        os.kill(pids[target], getattr(signal, name))
        if name == "SIGSTOP":  # as a machine that is suspended: shorter or longer than a timeout
            time.sleep(chance.uniform(0.5, 15.0))
            os.kill(pids[target], signal.SIGCONT)
    return target


def what_is_wrong(victim: Victim, expected: Any) -> str:
    """Say what a run lost or left behind; empty if nothing."""
    if alive := outlive(victim.folder):
        return f"{len(alive)} processes are left"
    if not victim.is_done():
        return tail(victim.folder)
    if left := litter(victim.run):
        return f"left behind: {left}"
    return difference(victim.left(), expected)


def _variables(
    folder: Path, launchers: tuple[str, ...], stack: ExitStack
) -> dict[str, dict[str, str]]:
    """Return by launcher what the environment of its runs must hold."""
    (folder / "server").mkdir(parents=True)
    found = dict.fromkeys(LAUNCHERS, dict[str, str]())
    found |= dict.fromkeys(FORKING, rank_server.start(folder / "server"))
    if "SLURM" in launchers:
        (folder / "slurm").mkdir()
        found["SLURM"] = stack.enter_context(slurm.running(folder / "slurm"))
    return found
