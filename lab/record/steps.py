"""steps.parquet: one row per rank and step."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
# (pyarrow has no types.)

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lab.settings.storage import read_bytes, write_atomically

STEPS = "steps.parquet"  # in a run's directory
LARGEST = 2**28  # values of a table; 16 MB of equal rows may unpack to gigabytes


def write_rows(path: Path, first_step: int, columns: Mapping[str, Any]) -> None:
    """Write `columns` of the steps of all ranks, behind the rows of steps before `first_step`.

    Those steps are timed no more: the record's statistics are of the last start of the run alone,
    which may have had other ranks.

    Raises: OSError: the file cannot be written.
    """
    table = pa.table({**columns})
    if first_step and path.exists():  # of a resumed run
        earlier = read_table(path).filter(pc.field("step") < first_step)
        if "timed" in earlier.column_names:  # a run of an early version has none
            earlier = earlier.drop_columns("timed")
        earlier = earlier.append_column("timed", pa.repeat(False, len(earlier)))
        table = pa.concat_tables([earlier, table], promote_options="default")
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))


def read_table(path: Path) -> pa.Table:
    """Read the steps of a run, unless the file unpacks to more than any run's steps take.

    Raises: Exception: it is too large, or damaged, which shows in many ways.
    """
    content = io.BytesIO(read_bytes(path))
    found = pq.read_metadata(content)
    if found.num_rows * found.num_columns > LARGEST:
        raise ValueError(f"too large, with {found.num_rows:,} rows of {found.num_columns} columns")
    return pq.read_table(content)
