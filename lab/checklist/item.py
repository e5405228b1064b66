"""A checklist for a machine: commands, figures and their expected ranges, of conf/checklist."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any

from lab.checklist.figures import Read, reader
from lab.record.files import decode
from lab.settings.errors import ConfigError
from lab.settings.files import read_file

FILE = "first_hour"  # of conf/checklist
NVLINK_4 = ("H100", "H200", "H800", "H20")  # eight of them behind switches
POWERS = (1, 2, 4, 8)
ASK = ("-m", "lab.checklist.hardware")

Node = dict[str, Any]


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


def query() -> dict[str, Any]:
    """Run lab.checklist.hardware and return its result.

    Raises:
        ConfigError: the query fails, or torch can use no GPU here.
    """
    done = subprocess.run([sys.executable, *ASK], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"lab.checklist.hardware failed: {said[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not found["usable"]:
        raise ConfigError(
            f"no GPU that {found['torch']} can use; nvidia-smi lists {found['num_listed']}"
        )
    return found


def machine_of(found: dict[str, Any], page: Path | None) -> tuple[Machine, Path]:
    """Return the machine and the path of its page, by default docs/results/gpu-NAME.md."""
    gpus = tuple(found["environment"]["gpus"])
    words = re.sub(r"nvidia|geforce|tesla", "", gpus[0].lower())
    number = f"{len(gpus)}-" if len(gpus) > 1 else ""  # h200, or 8-h200 for eight
    name = number + re.sub(r"[^a-z0-9]+", "-", words).strip("-")
    path = page or Path(f"docs/results/gpu-{name}.md")
    return Machine(gpus, path.with_suffix(""), found["memory_gb_per_s"]), path


@dataclass(frozen=True)
class Command:
    """A command of the lab, or another Python program.

    Attributes:
        name: name of its files, and of the cell if it is a run.
        python: arguments of `python`, as a shell takes them.
        num_ranks: number of ranks that torchrun starts; 0: started without torchrun.
        one_gpu: whether it sees only the first GPU.
        code: its expected exit code.
        counts_processes: whether nvidia-smi counts the processes on GPUs meanwhile.
        stop_rank_after_s: time after which rank 1 is stopped (SIGSTOP), like a lost rank.
    """

    name: str
    python: str
    num_ranks: int = 0
    one_gpu: bool = False
    code: int = 0
    counts_processes: bool = False
    stop_rank_after_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """Arguments of `python`."""
        return shlex.split(self.python)


@dataclass(frozen=True)
class Figure:
    """One number and its expected range.

    Attributes:
        read: see lab.checklist.figures.reader.
        why: the basis of the range, which is an estimate, not a measurement.
        equals: the one expected value; None: it lies from `low` to `high`, if there are such.
        of: what these are shares of; None: it is unknown.
        known: whether there is a range for this machine; if not, the number is noted.
    """

    name: str
    read: str
    why: str
    unit: str = ""
    equals: float | None = None
    low: float | None = None
    high: float | None = None
    of: float | None = 1.0
    known: bool = True

    def __post_init__(self) -> None:
        self.reader()  # refuses what cannot be read
        if (self.equals is None) == (self.low is None):
            raise ValueError(f"{self.name}: needs either equals or low")

    def reader(self) -> Read:
        """Return what reads the number."""
        return reader(self.read)

    def range(self) -> tuple[float, float] | None:
        """Return the least and the largest expected number; None: not known for this machine."""
        if self.of is None or not self.known:
            return None
        low, high = (self.low, self.high) if self.equals is None else (self.equals, self.equals)
        return self.of * (low or 0.0), math.inf if high is None else self.of * high

    def expected(self) -> str:
        """Write the range in words."""
        ends = self.range()
        if ends is None:
            return "not known for this machine"
        if ends[0] == ends[1]:
            return f"{ends[0]:g}"
        return f"at least {ends[0]:g}" if math.isinf(ends[1]) else f"{ends[0]:g} to {ends[1]:g}"


@dataclass(frozen=True)
class Item:
    """One line of the checklist.

    Attributes:
        key: its number, with a letter if a line has several parts: "4a".
        num_gpus: least number of GPUs.
    """

    key: str
    title: str
    figures: list[Figure]
    commands: list[Command] = field(default_factory=list[Command])
    num_gpus: int = 1


def checklist(machine: Machine) -> list[Item]:
    """List all items in the order of their numbers. Each needs at least its `num_gpus`.

    Raises:
        ConfigError: the file of items has a mistake.
    """
    content = read_file("checklist", FILE)
    names = content["names"] | _facts(machine)
    try:
        nodes = list(_repeated(content["items"], names))
        for node in nodes:
            _refuse_unknown(Item, [node])
            _refuse_unknown(Command, node.get("commands", []))
            _refuse_unknown(Figure, node.get("figures", []))
        items: list[Item] = decode(list[Item], nodes, "items")
    except KeyError as error:
        raise ConfigError(f"checklist={FILE}: there is no name {error}") from error
    except ValueError as error:
        raise ConfigError(f"checklist={FILE}: {error}") from error
    return sorted(items, key=lambda item: place(item.key))


def place(key: str) -> tuple[int, str]:
    """Return an item's sort key: its number, then its letter."""
    return int(re.sub(r"\D", "", key)), key


def _facts(machine: Machine) -> Node:
    """Return what the file may say of a machine, by name."""
    num_gpus = machine.num_gpus
    powers = [n for n in POWERS if n <= num_gpus]
    return {
        "folder": shlex.quote(str(machine.folder)),
        "num_gpus": num_gpus,
        "sizes": sorted({2, num_gpus}),
        "powers": ",".join(map(str, powers)),
        "most": powers[-1],
        "pairs": num_gpus * (num_gpus - 1) // 2,
        "memory_gb_per_s": machine.memory_gb_per_s,
        "is_h200": machine.has("H200"),
        "nvlink": num_gpus == 8 and machine.has(*NVLINK_4),
    }


def _repeated(nodes: list[Any], names: Node) -> Iterator[Any]:
    """Yield nodes with all names filled in; one with `for`, once for each value of its lists."""
    for node in nodes:
        if not isinstance(node, dict):
            yield _filled(node, names)
            continue
        lists: Node = _filled(node.get("for", {}), names)
        for values in zip(*lists.values(), strict=True) if lists else [()]:
            known = names | dict(zip(lists, values, strict=True))
            if "group" in node:
                yield from _repeated(node["group"], known)
            else:
                yield {key: _filled(each, known) for key, each in node.items() if key != "for"}


def _filled(value: Any, names: Node) -> Any:
    """Replace each $name in a value: by what it is if it stands alone, else by its text."""
    if isinstance(value, dict):
        return {key: _filled(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return list(_repeated(value, names))
    if not isinstance(value, str):
        return value
    alone = re.fullmatch(r"\$(\w+)", value)
    return names[alone[1]] if alone else Template(value).substitute(names)


def _refuse_unknown(kind: Any, nodes: list[Node]) -> None:
    known = [each.name for each in fields(kind)]
    for unknown in (key for node in nodes for key in node if key not in known):
        raise ValueError(f"{kind.__name__} has no {unknown}; allowed are {', '.join(known)}")
