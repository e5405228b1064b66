"""The state of a cell's directory: done, to run, or to run again."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from lab.record.schema import Record, Status, read_record
from lab.settings.errors import ConfigError
from lab.study.grid import Cell

FAILED: tuple[Status, ...] = ("failed", "oom", "timeout")
EARLIER = "failed-"  # then a number: an earlier attempt that `retry=failed` ran again


def recorded(root: Path, cell: Cell, retries: bool) -> Record | None:
    """Return the record of a cell that need not run again.

    An interrupted cell must, and with `retries` one that failed.

    Raises:
        ConfigError: the cell's directory holds another's record, or a file that is none, which
            must not be lost.
    """
    record = _record(root / cell.name)
    if record and record.cell != cell.name:
        where = root / cell.name / "record.json"
        raise ConfigError(f"{where}: is the record of {record.cell}; move it away")
    again = ("interrupted", *(FAILED if retries else ()))
    return None if record is None or record.status in again else record


def already(record: Record) -> str:
    """Describe a cell that is not run again."""
    again = "" if record.status == "done" else " (to try again: retry=failed)"
    return f"{record.status} already{again}"


def make_directory(root: Path, cell: Cell) -> Path:
    """Make a cell's directory empty, but for its earlier attempts that failed.

    A record of a failure becomes one of these; leftovers of a killed or interrupted attempt are
    deleted, because they are no measurement.
    """
    directory = root / cell.name
    record = _record(directory)
    directory.mkdir(exist_ok=True)
    left = [path for path in directory.iterdir() if not path.name.startswith(EARLIER)]
    if record and record.status in FAILED:
        _keep(directory, left)
        return directory
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return directory


def _keep(directory: Path, files: list[Path]) -> None:
    """Move an attempt's files to failed-1, or the next number that is free."""
    places = (directory / f"{EARLIER}{number}" for number in itertools.count(1))
    place = next(each for each in places if not each.exists())
    place.mkdir()
    # The record last: if this is killed in between, the cell still counts as failed.
    for path in sorted(files, key=lambda each: each.name == "record.json"):
        path.rename(place / path.name)


def _record(directory: Path) -> Record | None:
    try:
        return read_record(directory / "record.json")
    except OSError:
        return None
    except ValueError as error:
        raise ConfigError(str(error)) from None
