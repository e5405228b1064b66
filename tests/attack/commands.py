"""Signals to commands other than a training run; then the same command again.

Each file that a command writes is there as a whole, as before, or not at all; and the second start
leaves what an undisturbed one does. (A cell of a sweep of which one process was killed has failed,
as one that ran out of memory: `retry=failed` runs it again.)
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.attack.files import STUDY, make_files
from tests.attack.outcome import SURVIVED, Attempt
from tests.attack.victim import end, litter, outlive, processes, start, tail

LIMIT_S = 240.0
SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT")
GRID = ("study=made", "strategy=allreduce,onebit", "world_size=1,2", "device=cpu", "data.size=16")
SWEEP = (*GRID, "batch_size=24", "optim.lr=0.01", "steps=6")
RETRY = ("retry=failed",)
RECORDS = "runs/made/*/record.json"


@dataclass(frozen=True)
class Command:
    """A command, and what it leaves.

    Attributes:
        results: pattern of the files and folders that it writes.
        reads: whether it needs files of the lab.
        again: what the second start says besides.
    """

    line: tuple[str, ...]
    results: str
    reads: bool = True
    again: tuple[str, ...] = ()


COMMANDS = {
    "sweep": Command(("lab.sweep", *SWEEP), RECORDS, reads=False, again=RETRY),
    "turns": Command(
        ("lab.sweep", *SWEEP, "turns=2", "steps=8"), RECORDS, reads=False, again=RETRY
    ),
    "plot": Command(("lab.plot", STUDY, "format=svg"), f"{STUDY}/figures/*.svg"),
    "report": Command(("lab.report", STUDY, "out=page.html"), "page.html"),
    "verify": Command(("lab.verify", "onebit_adam", "out=claims.md"), "claims*"),
}


def attack(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Disturb `count` commands, and yield what came of each."""
    folder = folder.resolve()
    whole: dict[str, tuple[dict[str, object], float]] = {}
    for number in range(count):
        chance = random.Random(f"commands {seed} {number}")
        name = list(COMMANDS)[(seed + number) % len(COMMANDS)]
        if name not in whole:
            whole[name] = undisturbed(COMMANDS[name], folder / name)
        yield disturbed(name, chance, folder / f"{number}", *whole[name])


def undisturbed(command: Command, folder: Path) -> tuple[dict[str, object], float]:
    """Run a command to its end; return what it leaves, and the seconds that it took."""
    _prepare(command, folder)
    began = time.monotonic()
    code = _start(command, folder).wait(LIMIT_S)
    found = results(command, folder)
    assert code in (0, 1) and found, tail(folder)  # 1: a claim does not hold
    return found, time.monotonic() - began


def disturbed(
    name: str, chance: random.Random, folder: Path, expected: dict[str, object], took_s: float
) -> Attempt:
    """Send a signal, start again, and compare what is left with what an undisturbed one leaves."""
    command, sent = COMMANDS[name], chance.choice(SIGNALS)
    _prepare(command, folder)
    before = results(command, folder)
    process, after_s = _start(command, folder), chance.uniform(0.0, 1.05 * took_s)
    what = f"{name} {sent} after {after_s:.2f} s"
    try:
        time.sleep(after_s)
        if pids := processes(folder):
            with suppress(ProcessLookupError):
                os.kill(chance.choice(pids), getattr(signal, sent))
        process.wait(LIMIT_S)
        if alive := outlive(folder):
            return Attempt("kill a command", what, "hung", f"{len(alive)} processes are left")
        allowed = [before, expected]
        for file, content in results(command, folder).items():
            if not any(content == each.get(file) for each in allowed):
                return Attempt("kill a command", what, "lost", f"{file} is neither old nor new")
        code = _start(command, folder, command.again).wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return Attempt("kill a command", what, "hung", tail(folder))
    finally:
        end(folder)
    left = litter(folder)
    if left or results(command, folder) != expected:
        why = f"code {code}, left {left}: {tail(folder)}"
        return Attempt("kill a command", what, "lost", why)
    return Attempt("kill a command", what, SURVIVED)


def results(command: Command, folder: Path) -> dict[str, object]:
    """Return by name what a command left; of a record what two runs of one cell share."""
    found: dict[str, object] = {}
    written = [each for one in folder.glob(command.results) for each in (one, *one.rglob("*"))]
    for path in sorted(each for each in written if each.is_file()):
        name = str(path.relative_to(folder))
        if command.reads:
            found[name] = path.read_bytes()
        elif (record := json.loads(path.read_text()))["status"] == "done":
            found[name] = record["replica_hash"], record["num_steps"]
    return found


def _prepare(command: Command, folder: Path) -> None:
    folder.mkdir(parents=True)
    if command.reads:
        make_files(folder)


def _start(
    command: Command, folder: Path, besides: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    return start([sys.executable, "-m", *command.line, *besides], folder)
