"""Reading what no command reads alone: a checkpoint, and the starts of a run."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lab.data.arrays import arrays
from lab.record.run_directory import RunDirectory
from lab.settings.storage import read_bytes
from lab.training import checkpoint

STATE: dict[str, Any] = {"model": {"weight": torch.arange(6.0)}, "progress": {"step": 3}}


def save_checkpoint(root: Path) -> None:
    """Leave the checkpoint of step 3 of one rank."""
    alone: Any = SimpleNamespace(rank=0, size=1, barrier=lambda: None)
    checkpoint.save(root, 3, STATE, {"rng": torch.zeros(4)}, alone)


def seal(path: Path) -> None:
    """Give the checkpoint that a file is of its new digest, as a stranger can."""
    done = path.parent / "DONE"
    if path != done and done.is_file() and path.is_file() and path.stat().st_size < 2**30:
        content = json.loads(done.read_text())
        content["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        content["sizes"][path.name] = path.stat().st_size
        done.write_text(json.dumps(content))


def read_checkpoint(arguments: list[str]) -> int:
    """Read a checkpoint; a damaged one must be refused, and never be read as another."""
    try:
        shared, _ = checkpoint.load(Path(arguments[0]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    assert torch.equal(shared["model"]["weight"], STATE["model"]["weight"])
    return 0


def read_arrays(arguments: list[str]) -> int:
    """Read a user's data, without the process group of a run."""
    try:
        arrays(seed=0, device=torch.device("cpu"), path=arguments[0])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def begin_attempt(arguments: list[str]) -> int:
    """Begin another start of a run; what earlier ones left must not be lost."""
    folder = Path(arguments[0])
    path = folder / "attempts.json"
    before = read_bytes(path) if path.is_file() and path.stat().st_size < 2**30 else b""
    try:
        RunDirectory(folder).begin_attempt({"started_at": "2026-11-02T10:00:00+00:00"})
    except OSError as error:  # a folder or the like is in the way
        print(f"error: {error}", file=sys.stderr)
        return 2
    after = RunDirectory(folder).attempts()
    aside = folder / "attempts.damaged.json"
    kept = len(after) > 1 or not before or aside.read_bytes() == before
    assert kept, "earlier starts are lost"
    if aside.is_dir():
        aside.rmdir()
    aside.unlink(missing_ok=True)
    return 0
