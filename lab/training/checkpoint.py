"""Checkpoints: whole or absent, and exact for every rank.

    step_000100/shared.pt       what all ranks share: weights, optimizer, position in the data
    step_000100/rank_000.pt     what is this rank's own: residuals, random state; and weights and
                                optimizer where ranks exchange every so many steps alone
    step_000100/DONE            sizes and hashes of the files above, written last

A checkpoint is written under a temporary name and renamed when DONE is on disk, so one that a crash
cut short is never found.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lab.distributed.world import World
from lab.record.files import decode, write_json
from lab.settings.reading import read_json
from lab.settings.whole import write_atomically

KEEP = 2  # newest checkpoints of a run that stay on disk
NAME = re.compile(r"step_(\d{6,})")  # what lies beside under other names is the user's


@dataclass(frozen=True)
class Done:
    """The file DONE.

    Attributes:
        files: SHA-256 by name.
        sizes: bytes by name; empty: an older version wrote it.
    """

    world_size: int
    files: dict[str, str]
    sizes: dict[str, int] = field(default_factory=dict[str, int])


def save(root: Path, step: int, shared: dict[str, Any], own: dict[str, Any], world: World) -> None:
    """Write a checkpoint. All ranks call this after the same step.

    Args:
        root: the run's checkpoints directory.
        shared: state that is equal on all ranks; rank 0's is written.
        own: this rank's state.
    """
    unfinished = root / f".step_{step:06d}"
    if world.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    world.barrier()
    states = {f"rank_{world.rank:03d}.pt": own} | ({} if world.rank else {"shared.pt": shared})
    try:
        for name, state in states.items():
            _write(unfinished / name, state)
    except OSError:  # a full disk, which shall have room for the record
        for name in states:
            (unfinished / name).unlink(missing_ok=True)
        raise
    world.barrier()
    if world.rank == 0:
        files = sorted(unfinished.glob("*.pt"))
        sizes = {path.name: path.stat().st_size for path in files}
        done = Done(world.size, {path.name: _digest(path) for path in files}, sizes)
        write_json(unfinished / "DONE", asdict(done))
        final, replaced = root / f"step_{step:06d}", root / f".replaced_{step:06d}"
        if final.exists():  # of the same step; it stays until the new one is complete
            final.replace(replaced)
        unfinished.replace(final)
        _sync(root)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in _complete(root)[:-KEEP]:
            if not old.is_symlink():  # the user's, to a larger disk perhaps
                shutil.rmtree(old, ignore_errors=True)
    world.barrier()


def newest(root: Path) -> Path | None:
    """Return the newest whole checkpoint under `root`; None if there is none.

    A damaged one is passed over with a line on stderr: a job that is started again must go on.

    Raises:
        ValueError: there is none but damaged ones.
    """
    complete = _complete(root)
    for path in reversed(complete):
        try:
            _names_in(path)
            return path
        except ValueError as error:
            if path == complete[0]:
                raise
            print(f"{error}; trying the one before it", file=sys.stderr)
    return None


def load(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Load a checkpoint: the shared part, and every rank's part in rank order.

    Raises: ValueError: `path` is not a complete checkpoint, or one of its files was changed.
    """
    names = _names_in(path)
    return _read(path / "shared.pt"), [_read(path / name) for name in names]


def _names_in(path: Path) -> list[str]:
    """Return the files of ranks in a checkpoint, after checking that all are as DONE says.

    Raises: ValueError: see `load`.
    """
    if not (path / "DONE").is_file():
        raise ValueError(
            f"resume={path}: not a complete checkpoint; allowed are auto, and a directory "
            "checkpoints/step_… that holds DONE"
        )
    try:
        done = decode(Done, read_json(path / "DONE"), "")
        names = [f"rank_{rank:03d}.pt" for rank in range(len(done.files) - 1)]
        if {"shared.pt", *names} != {*done.files} or len(names) != done.world_size:
            raise ValueError("DONE names other files than its number of ranks has")
        damaged = [name for name in done.files if _was_changed(path / name, done)]
    except (OSError, ValueError) as error:
        raise ValueError(f"resume={path}: corrupt checkpoint: {error}") from None
    if damaged:
        raise ValueError(f"resume={path}: corrupt checkpoint: {', '.join(damaged)} was changed")
    return names


def _was_changed(path: Path, done: Done) -> bool:
    if not path.is_file():  # it is gone, or a pipe, which would never end
        return True
    size = path.stat().st_size
    return done.sizes.get(path.name, size) != size or _digest(path) != done.files[path.name]


def _complete(root: Path) -> list[Path]:
    steps = {path: NAME.fullmatch(path.name) for path in root.glob("step_*")}
    complete = {p: int(m[1]) for p, m in steps.items() if m and (p / "DONE").is_file()}
    return sorted(complete, key=lambda path: complete[path])


def _write(path: Path, state: dict[str, Any]) -> None:
    try:
        write_atomically(path, lambda temporary: torch.save(state, temporary))
    except RuntimeError as error:  # torch's word on a disk that is full, and does not say so
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"{path}: cannot be written, {free:,} bytes are free: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # the file was not written by `save`, which shows in many ways
        raise ValueError(
            f"resume={path.parent}: corrupt checkpoint: {path.name} holds more than tensors"
        ) from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
