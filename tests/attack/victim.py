"""A run that is disturbed, by whatever launcher, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.attack.launchers import LAUNCHERS
from tests.conftest import ROOT
from tests.support.cases import RESUMED

STEPS, EVERY = 16, 4
RUN = (
    *("device=cpu", "data.size=16", "batch_size=24", "optim.lr=0.01", "warmup_steps=2"),
    *(f"steps={STEPS}", f"checkpoint_every={EVERY}", "eval_every=5"),
)
END_S = 15.0  # by then all processes of a run whose launcher was killed have ended


@dataclass(frozen=True)
class Victim:
    """A run that is disturbed.

    Attributes:
        folder: in which all its processes run.
        variables: more of the environment.
        limit_s: exchange_timeout_s.
    """

    strategy: str
    size: int
    folder: Path
    launcher: str = "torchrun"
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    limit_s: float = 10.0

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.folder / "runs/default/a"

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, or start it again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = (f"strategy={self.strategy}", *RESUMED.get(self.strategy, ()))
        limit = f"exchange_timeout_s={self.limit_s:g}"
        settings = (*own, *RUN, limit, "cell=a", "resume=auto")
        return start(LAUNCHERS[self.launcher](self.size, settings), self.folder, self.variables)

    def is_done(self) -> bool:
        """Return whether its record says so: a signal may come after that, and before its end."""
        try:
            return bool(json.loads((self.run / "record.json").read_text())["status"] == "done")
        except FileNotFoundError:
            return False

    def left(self) -> dict[str, Any]:
        """Read its last checkpoint, and its record's status."""
        last = self.run / f"checkpoints/step_{STEPS:06d}"
        read = {p.name: torch.load(p, weights_only=True) for p in sorted(last.glob("*.pt"))}
        record = json.loads((self.run / "record.json").read_text())
        return {"files": read, "status": record["status"], "num_steps": record["num_steps"]}


def start(
    line: list[str], folder: Path, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in a folder; what it prints is appended to a file, `output` there."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    with (folder / "output").open("ab") as file:
        return subprocess.Popen(
            line,
            cwd=folder,
            env={**environment, **(variables or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def processes(folder: Path) -> list[int]:
    """List all processes that work in a folder, the first one first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended
            if path.readlink() == folder:
                found.append(int(path.parent.name))
    return sorted(found)


def outlive(folder: Path) -> list[int]:
    """Wait for the processes in a folder to end; return those that do not."""
    deadline = time.monotonic() + END_S
    while (alive := processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def end(folder: Path) -> None:
    """Kill whatever is left."""
    for pid in processes(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def tail(folder: Path) -> str:
    """Return the end of what was printed."""
    return (folder / "output").read_text(errors="replace")[-600:]


def litter(folder: Path) -> list[str]:
    """List temporary files that are left."""
    names = (path for path in folder.rglob(".*") if path.name != ".lock")
    return sorted(str(path.relative_to(folder)) for path in names)


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
