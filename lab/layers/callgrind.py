"""Counts of callgrind: instructions, loads, stores, and misses of two levels of simulated caches.

Virtual machines rarely have hardware counters, so valgrind executes the program instead
(J. Weidendorfer, Sequential Performance Analysis with Callgrind and KCachegrind, 2008). Its second
level is the last one. It simulates between the marks alone, from empty caches: the rest of a
program, such as importing torch and making kernels, would take most of the time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LEVEL = re.compile(r"\d+,\d+,\d+")
MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_TOGGLE_COLLECT; }
void end(void) { CALLGRIND_TOGGLE_COLLECT; CALLGRIND_STOP_INSTRUMENTATION; CALLGRIND_DUMP_STATS; }
"""


@dataclass(frozen=True)
class Counts:
    """Events in one piece of a program.

    Attributes:
        instructions: executed. loads, stores: instructions that read or write memory.
        l1_load_misses, l1_store_misses: of these, not found in the first level of data cache.
        l2_load_misses, l2_store_misses: nor in the second one.
    """

    instructions: int
    loads: int
    stores: int
    l1_load_misses: int
    l1_store_misses: int
    l2_load_misses: int
    l2_store_misses: int

    def less(self, base: Counts) -> Counts:
        """Subtract what calling costs; never below 0."""
        pairs = zip(vars(self).values(), vars(base).values(), strict=True)
        return Counts(*(max(0, mine - other) for mine, other in pairs))


EVENTS = ("Ir", "Dr", "Dw", "D1mr", "D1mw", "DLmr", "DLmw")  # callgrind's names, in Counts' order


def build_marks(folder: Path) -> Path:
    """Compile a library with `begin` and `end`, which do nothing outside callgrind.

    Raises:
        ValueError: there is no C compiler, or valgrind's header is missing.
    """
    source, library = folder / "marks.c", folder / "marks.so"
    source.write_text(MARKS)
    build = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    try:
        subprocess.run(build, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise ValueError("counters: needs a C compiler, cc") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        raise ValueError(f"counters: cc failed: {lines[0]}") from None
    return library


def command(program: Sequence[str], out: Path, l1: str, l2: str) -> list[str]:
    """Return the command that runs `program` under callgrind, counting nothing until it asks.

    Args:
        out: the files of its counts are OUT.1, OUT.2, ...
        l1, l2: of data caches: bytes, associativity and bytes of a line, as in 32768,8,64.

    Raises:
        ValueError: valgrind is not installed, or a cache is no such text.
    """
    for key, level in (("l1", l1), ("l2", l2)):
        if not LEVEL.fullmatch(level):
            raise ValueError(f"{key}={level}: must be BYTES,WAYS,LINE, as in 32768,8,64")
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise ValueError("counters: needs valgrind, which is not installed (apt install valgrind)")
    return [
        *(valgrind, "--tool=callgrind", "--cache-sim=yes"),
        *("--collect-atstart=no", "--instr-atstart=no"),
        *(f"--D1={l1}", f"--LL={l2}", f"--callgrind-out-file={out}", *program),
    ]


def run(
    program: Sequence[str], out: Path, l1: str, l2: str, variables: Mapping[str, str] | None = None
) -> str:
    """Run a program under callgrind; return what it prints.

    Args:
        variables: its environment; None: this process's.

    Raises:
        ValueError: as `command`; or the program failed, with its last line.
    """
    called = command(program, out, l1, l2)
    done = subprocess.run(called, capture_output=True, text=True, env=variables)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(f"counters: callgrind failed: {lines[-1]}")
    return done.stdout


def read(path: Path) -> Counts:
    """Read the totals of one of callgrind's files.

    Raises:
        ValueError: it is no such file, or it was counted without caches.
    """
    lines = dict(re.findall(r"^(events|totals): (.*)$", path.read_text(), re.MULTILINE))
    names = lines.get("events", "").split()
    if "totals" not in lines or not set(EVENTS) <= set(names):
        raise ValueError(f"{path}: is no file of callgrind with caches")
    totals = dict(zip(names, map(int, lines["totals"].split()), strict=False))
    return Counts(*(totals.get(name, 0) for name in EVENTS))
