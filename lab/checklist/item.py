"""Items of a checklist: commands, figures and their expected ranges."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNS = "runs"  # the lab's default
STUDY = "first_hour"  # of all runs that a checklist starts


@dataclass(frozen=True)
class Command:
    """A command of the lab, or another Python program.

    Attributes:
        name: name of its files, and of the cell if it is a run.
        words: arguments of `python`.
        num_ranks: number of ranks that torchrun starts; 0: started without torchrun.
        one_gpu: whether it sees only the first GPU.
        code: its expected exit code.
        counts_processes: whether nvidia-smi counts the processes on GPUs meanwhile.
        stop_rank_after_s: time after which rank 1 is stopped (SIGSTOP), like a lost rank.
    """

    name: str
    words: tuple[str, ...]
    num_ranks: int = 0
    one_gpu: bool = False
    code: int = 0
    counts_processes: bool = False
    stop_rank_after_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """Results of commands by name: output, JSON, and records of runs."""

    folder: Path

    def json(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text())

    def output(self, name: str) -> str:
        """Return a command's stdout and stderr."""
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def ended(self, name: str) -> dict[str, Any]:
        """Read a command's end: see lab.checklist.process.run."""
        return self.json(f"{name}.ended")

    def run(self, cell: str) -> Path:
        """Return the directory of a run."""
        return Path(RUNS) / STUDY / cell

    def record(self, cell: str) -> dict[str, Any]:
        return json.loads((self.run(cell) / "record.json").read_text())


@dataclass(frozen=True)
class Figure:
    """One number and its expected range.

    Attributes:
        why: the basis of the range, which is an estimate, not a measurement.
        known: whether there is a range for this machine; if not, the number is noted.
    """

    name: str
    unit: str
    read: Callable[[Results], float]
    low: float
    high: float
    why: str
    known: bool = True

    def expected(self) -> str:
        """Write the range in words."""
        if not self.known:
            return "not known for this machine"
        if self.low == self.high:
            return f"{self.low:g}"
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Item:
    """One line of the checklist.

    Attributes:
        key: its number, with a letter if a line has several parts: "4a".
        num_gpus: least number of GPUs.
    """

    key: str
    title: str
    commands: tuple[Command, ...]
    figures: tuple[Figure, ...]
    num_gpus: int = 1


@dataclass(frozen=True)
class Machine:
    """The machine that a checklist is made for.

    Attributes:
        gpus: the name of each GPU.
        folder: folder for the commands' files.
        memory_gb_per_s: peak rate of the first GPU's memory; None: unknown.
    """

    gpus: tuple[str, ...]
    folder: Path
    memory_gb_per_s: float | None = None

    @property
    def num_gpus(self) -> int:
        return len(self.gpus)

    def has(self, *kinds: str) -> bool:
        """Tell whether the first GPU is of one of these kinds."""
        return any(kind in self.gpus[0] for kind in kinds)


def place(key: str) -> tuple[int, str]:
    """Return an item's sort key: its number, then its letter."""
    return int(re.sub(r"\D", "", key)), key
