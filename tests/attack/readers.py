"""Damage every kind of file that the lab reads, and read it as a user's command does.

    python -m tests.attack.readers NAME SEED COUNT

attacks one reader in this process, and prints its attempts as lines of JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.settings import composition
from tests.attack import acts
from tests.attack.files import CELL, STUDY, make_files
from tests.attack.mutations import BYTES, JSON, YAML, Mutation
from tests.attack.outcome import REFUSED, SURVIVED, Attempt

Main = Callable[[list[str]], int]
# A command may compute for LIMIT_S, however busy the machine, and wait until ALARM_S have passed.
LIMIT_S, ALARM_S, MEMORY_BYTES = 10, 120, 2**30
LIMITS = (
    (signal.ITIMER_PROF, signal.SIGPROF, LIMIT_S),
    (signal.ITIMER_REAL, signal.SIGALRM, ALARM_S),
)


@dataclass(frozen=True)
class Reader:
    """A command that reads a file.

    Attributes:
        file: below the folder in which the command runs.
        command: one of the lab's, or a function of acts, and its arguments.
        mentions: what the output names if it leaves the damaged file out.
    """

    file: str
    mutations: tuple[Mutation, ...]
    command: tuple[str, ...]
    mentions: str = ""


def _plot(*words: str) -> tuple[str, ...]:
    return ("plot", *words, "format=svg")


TRAIN = ("train", "device=cpu", "--cfg", "job")
PREDICT = ("predict", "strategy=tree", "world_size=2")
TRACE = ("bench", "counters")
RUN = f"{STUDY}/{CELL}"
SAVED = f"{RUN}/checkpoints/step_000003"
READERS: dict[str, Reader] = {
    "record": Reader(f"{RUN}/record.json", JSON, _plot(STUDY, "only=speedup"), CELL),
    "timeline": Reader(f"{RUN}/timeline.json", JSON, _plot(RUN)),
    "steps": Reader(f"{RUN}/steps.parquet", BYTES, _plot(STUDY, "only=convergence"), CELL),
    "settings of a run": Reader(f"{RUN}/config.yaml", YAML, ("explain", RUN)),
    "starts of a run": Reader(f"{RUN}/attempts.json", JSON, ("begin_attempt", RUN)),
    "checkpoint": Reader(f"{SAVED}/shared.pt", BYTES, ("read_checkpoint", SAVED)),
    "digests of a checkpoint": Reader(f"{SAVED}/DONE", JSON, ("read_checkpoint", SAVED)),
    "claims": Reader("claims.yaml", YAML, ("verify", "claims.yaml")),
    "grids": Reader(f"{STUDY}/study.json", JSON, ("sweep", "study=made", "dry_run=true")),
    "profile": Reader("profile.yaml", YAML, (*PREDICT, "profile=profile.yaml")),
    "hardware": Reader("hardware.yaml", YAML, (*PREDICT, "hardware=hardware.yaml")),
    "strategy": Reader(
        "mine/strategy/my.yaml", YAML, (*TRAIN, "--config-dir", "mine", "strategy=my")
    ),
    "benchmark": Reader("layers.json", JSON, ("report", "layers.json", "out=page.html")),
    "trace": Reader("trace.json", JSON, (*TRACE, "trace=trace.json")),
    "gzipped trace": Reader("trace.json.gz", BYTES, (*TRACE, "trace=trace.json.gz")),
    "arrays": Reader("arrays.npz", BYTES, ("read_arrays", "arrays.npz")),
    "table": Reader("table.parquet", BYTES, ("read_arrays", "table.parquet")),
}


class TooLongError(BaseException):
    """The attempt has used up its time."""


def attack(name: str, seed: int, count: int, limit: bool) -> Iterator[Attempt]:
    """Damage one reader's file in `count` ways, and yield what came of each.

    The current folder must be empty.

    Args:
        limit: the memory of this process, for good.
    """
    reader = READERS[name]
    make_files(Path())
    whole = Path(reader.file).read_bytes()
    said, code = run(reader)  # imports are no attack's memory
    assert code == 0, f"{name}: refused unharmed: {said}"
    if limit:
        _limit_memory()
    for number in range(count):
        chance = random.Random(f"{name} {seed} {number}")
        mutation = chance.choice(reader.mutations)
        damaged = mutation(whole, chance)
        Path(reader.file).write_bytes(damaged)
        yield judged(f"read: {name}", f"{mutation.__name__} {seed}.{number}", reader, damaged)
        Path(reader.file).write_bytes(whole)


def judged(
    attack: str, what: str, reader: Reader, damaged: bytes, secrets: Sequence[str] = ()
) -> Attempt:
    """Run a command on a damaged file, and say what came of it.

    Args:
        secrets: that the file leads to; nothing that is printed or written may hold them.
    """
    began = time.time()
    try:
        said, code = run(reader)
    except TooLongError:
        return Attempt(attack, what, "hung")
    except MemoryError:
        return Attempt(attack, what, "memory")
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return Attempt(
            attack, what, "traceback", f"{type(error).__name__}: {error} ({place})"[:300]
        )
    if Path("ran").exists():
        Path("ran").rmdir()
        return Attempt(attack, what, "code run")
    told = (said.encode(), *_written_since(began))
    if any(secret.encode() in text for secret in secrets for text in told):
        return Attempt(attack, what, "secret", said[:200])
    errors = [line for line in said.splitlines() if "error:" in line]
    if code == 2:
        tidy = len(errors) == 1 and len(errors[0]) < 2100
        return Attempt(attack, what, REFUSED if tidy else "traceback", said[:200] + said[-200:])
    if reader.mentions and not readable(reader.file, damaged) and reader.mentions not in said:
        return Attempt(attack, what, "silent", said[:200] + said[-200:])
    return Attempt(attack, what, SURVIVED)


def _written_since(began: float) -> Iterator[bytes]:
    for path in Path().rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mtime >= began:
            yield path.read_bytes()


def readable(name: str, content: bytes) -> bool:
    """Return whether a file's format can be read at all."""
    if not name.endswith(".json"):
        return content[:4] == content[-4:] == b"PAR1"
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def run(reader: Reader) -> tuple[str, int]:
    """Run a command in this process, within its limits; return what it printed, and its code."""
    module, *arguments = reader.command
    main: Main = getattr(acts, module, None) or importlib.import_module(f"lab.{module}").main
    said = io.StringIO()
    previous = [signal.signal(number, _too_long) for _, number, _ in LIMITS]
    for timer, _, seconds in LIMITS:
        signal.setitimer(timer, seconds)
    composition._composed.cache_clear()  # a command reads its files once
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                code = main(arguments)
            except SystemExit as end:
                code = int(end.code or 0)
    finally:
        for (timer, number, _), before in zip(LIMITS, previous, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, before)
    return said.getvalue(), code


def _too_long(_number: int, _frame: object) -> None:
    raise TooLongError


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        for attempt in attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), limit=True):
            print(json.dumps(asdict(attempt)), flush=True)
