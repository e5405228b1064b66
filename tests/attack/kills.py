"""Signals to any process of a run at a random moment; then the same command until it is done.

What a run leaves in the end must be what an undisturbed one leaves: weights, residuals, optimizer.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.attack.outcome import SURVIVED, Attempt
from tests.conftest import ROOT
from tests.support import rank_server
from tests.support.cases import BY_THE_CLOCK, RESUMED, STRATEGIES

STEPS, EVERY = 16, 4
RUN = (
    *("device=cpu", "data.size=16", "batch_size=24", "optim.lr=0.01", "warmup_steps=2"),
    *(f"steps={STEPS}", f"checkpoint_every={EVERY}", "eval_every=5", "exchange_timeout_s=10"),
)
SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGUSR1")
LIMIT_S, STARTS = 120.0, 4
# Not equal in bits after a resume: what decides by the clock, and what has other buckets or
# reductions then (docs/reliability.md).
UNEQUAL = (*BY_THE_CLOCK, "ddp", "priority", "fsdp", "hsdp", "zeropp")
ALL = [strategy for strategy in STRATEGIES if strategy not in UNEQUAL]


@dataclass(frozen=True)
class Victim:
    """A run that is disturbed.

    Attributes:
        folder: in which all its processes run.
        forks: what makes ranks forks of a process that has imported torch; empty: they import it.
    """

    strategy: str
    size: int
    folder: Path
    forks: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def command(self) -> list[str]:
        """The command line of every start."""
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.size}"]
        more = RESUMED.get(self.strategy, ())
        run = ("lab.train", f"strategy={self.strategy}", *more, *RUN, "cell=a", "resume=auto")
        return [sys.executable, "-m", *launcher, "-m", *run]

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.folder / "runs/default/a"

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, or start it again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                self.command,
                cwd=self.folder,
                env={**environment, **self.forks},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """List all its processes, the launcher first: those that work in its folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):  # it has ended
                if path.readlink() == self.folder:
                    found.append(int(path.parent.name))
        return sorted(found)

    def is_done(self) -> bool:
        """Return whether its record says so: a signal may come after that, and before its end."""
        try:
            return bool(json.loads((self.run / "record.json").read_text())["status"] == "done")
        except FileNotFoundError:
            return False

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def attack(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Disturb `count` runs, and yield what came of each."""
    folder = folder.resolve()
    (folder / "server").mkdir(parents=True)
    forks = rank_server.start(folder / "server")
    whole: dict[tuple[Any, ...], tuple[Any, float]] = {}
    for number in range(count):
        chance = random.Random(f"kills {seed} {number}")
        strategy = ALL[(seed + number) % len(ALL)]
        size = chance.choice((1, 2, 3, 4))
        environment = forks if number % 4 else {}  # each fourth run may be killed as it imports
        key = strategy, size, bool(environment)
        if key not in whole:
            alone = folder / "-".join(map(str, key))
            whole[key] = undisturbed(Victim(strategy, size, alone, environment))
        victim = Victim(strategy, size, folder / f"{number}", environment)
        yield disturbed(victim, chance, *whole[key])


def undisturbed(victim: Victim) -> tuple[Any, float]:
    """Run to the end; return what it leaves, and the seconds that it took."""
    began = time.monotonic()
    code = victim.start().wait(LIMIT_S)
    assert code == 0, (victim.folder / "output").read_text()[-3000:]
    return left_by(victim.run), time.monotonic() - began


def disturbed(victim: Victim, chance: random.Random, expected: Any, took_s: float) -> Attempt:
    """Send a signal, start again until the run is done, and compare what it leaves."""
    name, after_s = chance.choice(SIGNALS), chance.uniform(0.0, 1.05 * took_s)
    process, began = victim.start(), time.monotonic()
    time.sleep(after_s)
    target = send(name, victim, chance)
    what = f"{victim.strategy} n={victim.size} {name} after {after_s:.2f} s to process {target}"
    attempt = Attempt(f"kill: {name}", what, SURVIVED)
    try:
        codes = [process.wait(LIMIT_S)]
        while codes[-1] != 0 and not victim.is_done() and len(codes) < STARTS:
            codes.append(victim.start().wait(LIMIT_S))
    except subprocess.TimeoutExpired:
        return replace(attempt, outcome="hung", said=tail(victim))
    else:
        lost_s = max(0.0, time.monotonic() - began - took_s)
        time.sleep(1.0)  # ranks that have written all may outlive a killed launcher
        if wrong := what_is_wrong(victim, expected):
            return replace(attempt, outcome="lost", said=f"codes {codes}: {wrong}")
        return replace(attempt, said=f"{lost_s:.1f}")
    finally:
        victim.end()


def send(name: str, victim: Victim, chance: random.Random) -> int | None:
    """Send a signal to one of a run's processes; return which, or None if all have ended."""
    pids = victim.processes()
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
    if not victim.is_done():
        return tail(victim)
    if alive := victim.processes():
        return f"{len(alive)} processes are left"
    if litter := sorted(str(p) for p in victim.run.rglob(".*") if p.name != ".lock"):
        return f"left behind: {litter}"
    return difference(left_by(victim.run), expected)


def tail(victim: Victim) -> str:
    """Return the end of what a run printed."""
    return (victim.folder / "output").read_text(errors="replace")[-600:]


def left_by(run: Path) -> dict[str, Any]:
    """Read a run's last checkpoint, and its record's status."""
    last = run / f"checkpoints/step_{STEPS:06d}"
    files = {path.name: torch.load(path, weights_only=True) for path in sorted(last.glob("*.pt"))}
    record = json.loads((run / "record.json").read_text())
    return {"files": files, "status": record["status"], "num_steps": record["num_steps"]}


def difference(one: Any, other: Any, where: str = "") -> str:
    """Say where two states differ, but for times; empty if nowhere."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{where}: {sorted(map(str, one.keys() ^ other.keys()))}"
        parts = ((key, one[key], other[key]) for key in one if key not in ("seconds", "wall_s"))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} values"
        parts = ((at, a, b) for at, (a, b) in enumerate(zip(one, other, strict=True)))
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return "" if torch.equal(one, other) else f"{where}: tensors differ"
    else:
        return "" if one == other else f"{where}: {one!r} and {other!r}"[:300]
    return next((found for k, a, b in parts if (found := difference(a, b, f"{where}/{k}"))), "")
