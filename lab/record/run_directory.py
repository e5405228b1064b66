"""The run directory: the contract between a run and its readers."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from lab.record.schema import Record
from lab.settings.storage import (
    DamagedFile,
    lock,
    open_lock,
    read_json,
    read_yaml,
    write_json,
    write_text,
)

SETTINGS = "config.yaml"
OUTPUT = "output.log"  # of the ranks of a cell
LOCK = ".lock"
LOCK_WAIT_S = 10.0  # time for a killed run to disappear


class RunDirectory:
    """`<runs_dir>/<study>/<cell>/`, written by rank 0 only, except each rank's checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._above: list[Path] = []  # folders made for this one: of the study, and of all runs

    @classmethod
    def acquire(
        cls,
        parent: Path,
        cell: str | None,
        name: str,
        resume: str | None,
        launch: str | None = None,
    ) -> RunDirectory:
        """Find the directory of a new run, or of the one to continue.

        A record is never overwritten: a `cell` that the user named must not hold one, and a
        generated `name` is numbered until it is free. resume="auto" selects the cell, or the last
        directory of that name, unless it is done. A job that its launcher restarts (the same
        `launch`) continues in its own directory, even if that is done. Until `release` no other
        process can claim the directory.

        Raises: ValueError: the directory cannot be created or written, or is taken.
        """
        above = [folder for folder in (parent, parent.parent) if not folder.exists()]
        # Not by name: it contains the number of ranks, which may have changed.
        restarted = (cls(path.parent) for path in sorted(parent.glob("*/attempts.json")))
        earlier = next((run for run in restarted if run.was_started_by(launch)), None)
        if earlier:
            directory = earlier
        elif cell:
            directory = cls(parent / cell)
        elif resume == "auto" and (unfinished := cls._last_unfinished(parent, name)):
            directory = unfinished
        else:
            directory = cls._new(parent, name)
        directory._above = above
        directory._lock_out_others()
        try:
            if cell and not earlier:
                directory._check_free(resume)
        except ValueError:
            directory.release()
            raise
        return directory

    def require_own(self) -> None:
        """Check that what the path names is still the directory that this run has claimed.

        Raises: OSError: another is in its place; nothing may be written there.
        """
        if self._lock and not os.path.samestat(
            os.fstat(self._lock.fileno()), (self.path / LOCK).lstat()
        ):
            raise OSError(f"{self.path}: another directory has taken the place of this run's")

    def release(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def _lock_out_others(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open_lock(self.path / LOCK)
        except OSError as error:
            raise ValueError(f"runs_dir: cannot write {self.path}: {error.strerror}") from None
        if not lock(self._lock, LOCK_WAIT_S):
            self.release()
            raise ValueError(f"runs_dir: another run is still writing {self.path}")

    def _check_free(self, resume: str | None) -> None:
        status, holds = self.status(), ""
        if status == "done" or (status and resume != "auto"):
            holds = f"already contains a record ({status})"
        elif self.attempts() and resume != "auto":
            holds = "contains a run that was killed"
        if holds:
            raise ValueError(
                f"cell={self.path.name}: {self.path} {holds}; choose another cell"
                + ("" if status == "done" else ", or resume=auto")
            )

    @classmethod
    def _new(cls, parent: Path, name: str) -> RunDirectory:
        """Claim the first free one of name, name-2, name-3 …"""
        for path in _numbered(parent, name):
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if path.is_dir():
                    continue
                raise ValueError(
                    f"runs_dir: cannot write {path}: a file with this name exists"
                ) from None
            except OSError as error:
                raise ValueError(f"runs_dir: cannot write {path}: {error.strerror}") from None
            return cls(path)
        raise AssertionError("numbers do not end")

    @classmethod
    def _last_unfinished(cls, parent: Path, name: str) -> RunDirectory | None:
        taken = [cls(path) for path in itertools.takewhile(Path.is_dir, _numbered(parent, name))]
        return next((run for run in reversed(taken) if run.status() != "done"), None)

    def was_started_by(self, launch: str | None) -> bool:
        """Return whether the last attempt at this run belongs to the same job."""
        attempts = self.attempts()
        return bool(launch and attempts and attempts[-1].get("launch") == launch)

    def begin_attempt(self, attempt: dict[str, Any]) -> None:
        """Record that the run begins, or continues after an early end."""
        path, attempts = self.path / "attempts.json", self.attempts()
        if attempts:
            began = datetime.fromisoformat(attempts[-1]["started_at"]).timestamp()
            attempts[-1]["ended"] = "killed: the run left no record"
            if self.recorded_since(began):
                attempts[-1]["ended"] = self._ended()
        else:  # a file that cannot be read is kept: this one would replace it
            with contextlib.suppress(FileNotFoundError):
                path.rename(self.path / "attempts.damaged.json")
        write_json(path, [*attempts, attempt])

    def attempts(self) -> list[dict[str, Any]]:
        """Return every start of this run in order; all but the last have `ended`."""
        try:
            attempts = read_json(self.path / "attempts.json")
            for attempt in attempts:
                datetime.fromisoformat(attempt["started_at"])
        except (OSError, ValueError, TypeError, KeyError):
            return []
        return attempts

    def _ended(self) -> str:
        try:
            record = read_json(self.record_path)
            return f"{record['status']}: {record['error']}"
        except (ValueError, TypeError, KeyError):
            return "its record cannot be read"

    def status(self) -> str | None:
        """Return the status in this directory's record; None without a record.

        Nothing else is read, so that a record of any schema is protected from overwriting.
        """
        try:
            return read_json(self.record_path)["status"]
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @property
    def record_path(self) -> Path:
        return self.path / "record.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def recorded_since(self, moment: float) -> bool:
        """Return whether a record was written after `moment`, in seconds since the epoch."""
        return self.record_path.exists() and self.record_path.stat().st_mtime >= moment

    def discard_if_empty(self) -> None:
        """Remove the directory of a run that did not begin, and those above it made with it."""
        with contextlib.suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [LOCK]:
                (self.path / LOCK).unlink()
                for folder in (self.path, *self._above):
                    folder.rmdir()

    def write_config(self, yaml: str) -> None:
        write_text(self.path / SETTINGS, yaml)

    def write_record(self, record: Record) -> None:
        """Write the certificate, if there is one, and the record, the last file of a run.

        Raises: OSError: the directory cannot be written, or is another by now.
        """
        self.require_own()
        if record.certificate:
            write_json(self.path / "certificate.json", asdict(record.certificate))
        record.write(self.record_path)


def _numbered(parent: Path, name: str) -> Iterator[Path]:
    yield parent / name
    for number in itertools.count(2):
        yield parent / f"{name}-{number}"


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the composed settings of the run in a folder.

    They may be a stranger's: nothing that they name is ever called.

    Raises:
        DamagedFile: the file holds no settings.
        OSError: it cannot be read.
    """
    path = folder / SETTINGS
    content: dict[object, Any] = read_yaml(path)
    if not isinstance(content, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DamagedFile(f"{path}: must contain keys and values")
    return {str(key): value for key, value in content.items()}
