"""Two of the same at once: both do their work, or one does and the other says why it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tests.attack.files import STUDY, make_files
from tests.attack.launchers import missing
from tests.attack.outcome import REFUSED, SURVIVED, Attempt
from tests.attack.victim import end, litter, outlive, start
from tests.support.ports import free_port

LIMIT_S = 240.0
QUICK = ("device=cpu", "data.size=16", "batch_size=24", "optim.lr=0.01", "steps=8")
TRAIN = ("lab.train", "strategy=onebit", *QUICK)
TWO = (*("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"), *TRAIN)


@dataclass(frozen=True)
class Pair:
    """Two processes that start at the same moment.

    Attributes:
        first, second: arguments of `python -m`.
        num_done: how many records must say `done` in the end, if not all that were started.
        reads: whether they need files of the lab.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    num_done: int
    variables: dict[str, str] = field(default_factory=dict[str, str])
    reads: bool = False


def _of(line: tuple[str, ...], num_done: int) -> Pair:
    return Pair(line, line, num_done)


def pairs() -> dict[str, Pair]:
    """Return all pairs that this machine can run."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    one_rank = {**alone, "MASTER_ADDR": "localhost"}
    sweep = ("lab.sweep", "study=s", "strategy=allreduce,onebit", "world_size=1,2", *QUICK)
    hosts = ("lab.train", "cluster=emulated", "cluster.hosts=2", *QUICK)
    empty_cache = {"XDG_CACHE_HOME": "cache"}
    found = {
        "one cell": _of((*TRAIN, "cell=a"), 1),
        "one cell of two ranks": _of((*TWO, "cell=a"), 1),
        "one cell, resumed": _of((*TRAIN, "cell=a", "resume=auto", "checkpoint_every=2"), 1),
        "names by time": _of(TRAIN, 2),
        "one study": _of(sweep, 4),
        "one cache of kernels": Pair(
            (*TRAIN, "cell=a"), (*TRAIN, "cell=b"), 2, variables=empty_cache
        ),
        "one port": Pair(TRAIN, TRAIN, 1, {**one_rank, "MASTER_PORT": str(free_port())}),
        "one page": replace(_of(("lab.report", STUDY, "out=page.html"), 0), reads=True),
        "one study's figures": replace(_of(("lab.plot", STUDY, "format=svg"), 0), reads=True),
        "a page during a sweep": Pair(sweep, ("lab.report", "runs/s", "out=page.html"), 4),
        "figures during a sweep": Pair(sweep, ("lab.plot", "runs/s"), 4),
    }
    if "hosts" not in missing():
        found["two clusters"] = Pair((*hosts, "cell=a"), (*hosts, "cell=b"), 2)
    return found


def attack(folder: Path) -> Iterator[Attempt]:
    """Start all pairs, one after the other, and yield what came of each."""
    for name, pair in pairs().items():
        yield tried(name, pair, folder.resolve() / name.replace(" ", "_"))


def tried(name: str, pair: Pair, folder: Path) -> Attempt:
    """Start two processes, wait for both, and look at what they say and leave."""
    folder.mkdir(parents=True)
    if pair.reads:
        make_files(folder)
    both = [_start(line, folder, pair, n) for n, line in enumerate((pair.first, pair.second))]
    try:
        codes = [process.wait(LIMIT_S) for process, _ in both]
    except subprocess.TimeoutExpired:
        return Attempt("two processes at once", name, "hung")
    finally:
        alive = outlive(folder)
        end(folder)
    said = [path.read_text(errors="replace") for _, path in both]
    judged = partial(Attempt, "two processes at once", name)
    if alive:
        return judged("hung", f"{len(alive)} processes are left")
    if wrong := [text for code, text in zip(codes, said, strict=True) if code and not tidy(text)]:
        return judged("traceback", wrong[0][-1500:])
    if num_done(folder) < pair.num_done or codes.count(0) == 0:
        return judged("lost", f"codes {codes}: {[text[-300:] for text in said]}")
    if left := litter(folder / "runs"):
        return judged("lost", f"left behind: {left}")
    return judged(REFUSED if any(codes) else SURVIVED, "")


def tidy(text: str) -> bool:
    """Return whether a command that failed said why in one line of the lab's, the first of all."""
    errors = [line for line in text.splitlines() if line.startswith("lab.") and "error:" in line]
    return len(errors) == 1 and "Traceback" not in text.partition(errors[0])[0]


def num_done(folder: Path) -> int:
    """Count the records that say `done`."""
    records = folder.glob("runs/*/*/record.json")
    return sum(json.loads(path.read_text())["status"] == "done" for path in records)


def _start(
    line: tuple[str, ...], folder: Path, pair: Pair, number: int
) -> tuple[subprocess.Popen[bytes], Path]:
    output = folder / f"output{number}"
    return start([sys.executable, "-m", *line], folder, pair.variables, output), output
