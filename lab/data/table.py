"""Columns of a parquet table, as inputs and targets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.data.files import reading


def read_columns(
    file: Path, inputs: str | Sequence[str] | None, target: str
) -> tuple[np.ndarray, np.ndarray]:
    """Read inputs [rows, columns] and targets [rows] of a table.

    Args:
        inputs: names of columns; None: all but the target.
        target: name of a column.

    Raises:
        ValueError: the file is no such table, lacks a column or a value, or holds other than
            numbers.
    """
    import pyarrow.parquet as parquet  # slow to import

    with reading(file):
        there = list(parquet.read_schema(file).names)
    listed = [inputs] if isinstance(inputs, str) else list(inputs or ())
    listed = listed or [name for name in there if name != target]
    for name in {name for name in listed if listed.count(name) > 1 or name == target}:
        raise ValueError(f"data.inputs={name}: {file}: is named twice, or is the target")
    for key, name in [*(("inputs", name) for name in listed), ("targets", target)]:
        if name not in there:
            raise ValueError(f"data.{key}={name}: {file} has no such column; {', '.join(there)}")
    with reading(file):
        num_rows = parquet.read_metadata(file).num_rows
    _require_memory(file, num_rows, len(listed) + 1)
    with reading(file):
        table = parquet.read_table(file, columns=[*listed, target])
    values = {name: _numbers(file, name, table[name]) for name in table.column_names}
    return np.stack([values[name] for name in listed], axis=1), values[target]


def _require_memory(file: Path, rows: int, columns: int) -> None:
    """Refuse a table that does not fit: equal rows may take megabytes in a file, and much here."""
    needed, there = 8 * rows * columns, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there / 2:
        raise ValueError(
            f"data.path={file}: {rows:,} rows of {columns} columns need {needed / 2**30:.0f} GiB; "
            f"half of this machine's {there / 2**30:.0f} GiB are allowed"
        )


def _numbers(file: Path, name: str, column: Any) -> np.ndarray:
    """Return the values of a column (pyarrow.ChunkedArray), [rows]."""
    if column.null_count:
        raise ValueError(f"data.path={file}: column {name} lacks {column.null_count} values")
    values = column.to_numpy()
    if values.dtype.kind not in "biuf":
        raise ValueError(
            f"data.path={file}: column {name} holds {column.type}, not numbers; name the columns "
            "to learn from in data.inputs"
        )
    return values
