"""The run directory: the contract between a run and everything that reads it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from lab.record.files import write_atomically, write_json
from lab.record.schema import Record

LOCK = ".lock"
LOCK_WAIT_S = 10.0  # what a killed run may take to be gone


class RunDirectory:
    """`<runs_dir>/<study>/<cell>/`, written by rank 0 alone but for each rank's checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @classmethod
    def claim(
        cls,
        parent: Path,
        cell: str | None,
        name: str,
        resume: str | None,
        launch: str | None = None,
    ) -> RunDirectory:
        """Find the directory of a new run, or of the one to continue.

        What is already recorded is never written over: a `cell` that the user named may not hold a
        record, and a `name` made up for him is numbered until it is free. With resume="auto" it is
        the cell, or the last of that name, as long as it is not done. A job that
        its launcher starts anew, `launch`, goes on in the directory where it was, and finds it
        done if it is. Until `release` no other process can claim the same one.

        Raises:
            ValueError: the directory cannot be created or written, or is taken.
        """
        earlier = cls._started_by(launch, parent)
        if earlier:
            found = earlier
        elif cell:
            found = cls(parent / cell)
        elif resume == "auto" and (unfinished := cls._last_unfinished(parent, name)):
            found = unfinished
        else:
            found = cls._new(parent, name)
        found._lock_out_others()
        try:
            if cell and not earlier:
                found._check_free(resume)
        except ValueError:
            found.release()
            raise
        return found

    def release(self) -> None:
        """Let another process claim this directory."""
        if self._lock:
            self._lock.close()

    def _lock_out_others(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("w")
        except OSError as error:
            raise ValueError(f"runs_dir: cannot write {self.path}: {error.strerror}") from None
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.release()
                    raise ValueError(f"runs_dir: another run still writes {self.path}") from None
                time.sleep(0.2)
            except OSError:  # a file system without locks
                return

    def _check_free(self, resume: str | None) -> None:
        status = self.status()
        if status == "done" or (status and resume != "auto"):
            raise ValueError(
                f"cell={self.path.name}: {self.path} already holds a record ({status}); choose "
                "another cell" + ("" if status == "done" else ", or resume=auto")
            )
        if self.attempts() and resume != "auto":
            raise ValueError(
                f"cell={self.path.name}: {self.path} holds a run that was killed; choose another "
                "cell, or resume=auto"
            )

    @classmethod
    def _new(cls, parent: Path, name: str) -> RunDirectory:
        """The first of name, name-2, name-3 … that nobody has; now it is ours."""
        for path in _numbered(parent, name):
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if path.is_dir():
                    continue
                raise ValueError(f"runs_dir: cannot write {path}: a file is there") from None
            except OSError as error:
                raise ValueError(f"runs_dir: cannot write {path}: {error.strerror}") from None
            return cls(path)
        raise AssertionError("numbers do not end")

    @classmethod
    def _last_unfinished(cls, parent: Path, name: str) -> RunDirectory | None:
        taken = [cls(path) for path in itertools.takewhile(Path.is_dir, _numbered(parent, name))]
        return next((run for run in reversed(taken) if run.status() != "done"), None)

    @classmethod
    def _started_by(cls, launch: str | None, parent: Path) -> RunDirectory | None:
        # Not by name, which holds the number of ranks: there may be fewer now.
        if launch is None:
            return None
        runs = (cls(path.parent) for path in sorted(parent.glob("*/attempts.json")))
        return next((run for run in runs if run.was_started_by(launch)), None)

    def was_started_by(self, launch: str | None) -> bool:
        """Whether the last attempt at this run is of the same job."""
        attempts = self.attempts()
        return bool(launch and attempts and attempts[-1].get("launch") == launch)

    def begin_attempt(self, attempt: dict[str, Any]) -> None:
        """Note that the run begins, or goes on after it ended early."""
        attempts = self.attempts()
        if attempts:
            attempts[-1]["ended"] = self._how_it_ended(attempts[-1])
        write_json(self.path / "attempts.json", [*attempts, attempt])

    def attempts(self) -> list[dict[str, Any]]:
        """Every start of this run, the first one first; all but the last have `ended`."""
        try:
            return json.loads((self.path / "attempts.json").read_text())
        except (OSError, ValueError):
            return []

    def _how_it_ended(self, attempt: dict[str, Any]) -> str:
        began = datetime.fromisoformat(attempt["started_at"]).timestamp()
        if not self.recorded_since(began):
            return "killed: it left no record"
        record = json.loads(self.record_path.read_text())
        return f"{record['status']}: {record['error']}"

    def status(self) -> str | None:
        """How the run that is recorded here ended; None without a record.

        No more than this is read: a record of any schema is not to be written over.
        """
        try:
            return json.loads(self.record_path.read_text())["status"]
        except (OSError, ValueError, KeyError):
            return None

    @property
    def record_path(self) -> Path:
        return self.path / "record.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def recorded_since(self, moment: float) -> bool:
        """Whether a record was written after `moment`, in seconds since the epoch."""
        return self.record_path.exists() and self.record_path.stat().st_mtime >= moment

    def discard_if_empty(self) -> None:
        """Leave nothing behind of a run that did not begin."""
        with contextlib.suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [LOCK]:
                (self.path / LOCK).unlink()
                self.path.rmdir()

    def write_config(self, yaml: str) -> None:
        """The resolved configuration."""
        write_atomically(self.path / "config.yaml", lambda path: path.write_text(yaml))

    def write_record(self, record: Record) -> None:
        """Write the record, the last thing that a run writes."""
        record.write(self.record_path)


def _numbered(parent: Path, name: str) -> Iterator[Path]:
    yield parent / name
    for number in itertools.count(2):
        yield parent / f"{name}-{number}"
