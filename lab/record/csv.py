"""Curves as a table: curves.csv in the run directory."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from lab.record.schema import Record
from lab.settings.whole import write_atomically

CURVES = "curves.csv"  # in a run's directory
Row = dict[str, Any]


class CsvRecorder:
    """One row per step and one column per curve; a field is empty where a step has no value."""

    def __init__(self) -> None:
        self._path = Path()
        self._columns = ["step"]
        self._row: Row = {}  # of the last step, which may get more values
        self._file: TextIO | None = None

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        """Begin the table, or go on with the rows of the steps that a resumed run has done."""
        self._path = directory / CURVES
        earlier = self._read() if first_step and self._path.exists() else []
        self._begin([row for row in earlier if int(row["step"]) <= first_step])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._row.get("step") != step:
            self._write_row()
            self._row = {"step": step}
        self._row |= values

    def finish(self, record: Record) -> None:
        self._write_row()
        self._close()

    def _write_row(self) -> None:
        if not self._row:
            return
        if new := [name for name in self._row if name not in self._columns]:
            self._columns += new
            self._close()
            self._begin(self._read())
        self._writer.writerow(self._row)

    def _read(self) -> list[Row]:
        with self._path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            self._columns = [*names, *(name for name in self._columns if name not in names)]
            return list(reader)

    def _begin(self, rows: list[Row]) -> None:
        """Write the file with `rows`, and keep it open for more."""

        def write(path: Path) -> None:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(rows)

        write_atomically(self._path, write)
        # By line: what a killed run has logged is in its file.
        self._file = self._path.open("a", newline="", encoding="utf-8", buffering=1)
        self._writer = csv.DictWriter(self._file, self._columns)

    def _close(self) -> None:
        if self._file:
            self._file.close()
