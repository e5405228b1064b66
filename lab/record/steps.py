"""steps.parquet: one row per rank and step."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
# (pyarrow has no types.)

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lab.measure.spans import OWN, PHASES
from lab.settings.reading import read_bytes
from lab.settings.whole import write_atomically

STEPS = "steps.parquet"  # in a run's directory
LARGEST = 2**28  # values of a table; 16 MB of equal rows may unpack to gigabytes
Array = np.ndarray[Any, np.dtype[Any]]


def write_steps(
    path: Path,
    first_step: int,
    before_s: float,
    timed: Array,
    step_s: Array,
    phase_s: Array,
    own_s: Array,
    ready_s: Array,
    loss: Array,
) -> None:
    """Write the steps of all ranks.

    Args:
        path: the file to write.
        first_step: number of the first step. In a resumed run it is not 0: earlier rows stay.
        before_s: training time before it.
        timed: which steps statistics count, [steps].
        step_s, loss: [ranks, steps].
        phase_s: [ranks, steps, phases]; NaN where nothing was marked.
        own_s: [ranks, steps, kinds of own work, as in OWN]; NaN: unknown.
        ready_s: [ranks, steps, buckets], from the step's begin; NaN: unknown.

    Raises: OSError: the file cannot be written.
    """
    ranks, steps = step_s.shape
    columns = {
        "rank": np.repeat(np.arange(ranks, dtype=np.int32), steps),
        "step": np.tile(np.arange(first_step, first_step + steps, dtype=np.int64), ranks),
        "timed": np.tile(timed, ranks),
        "step_s": step_s.ravel(),
        **{f"{name}_s": phase_s[:, :, i].ravel() for i, name in enumerate(PHASES)},
        **{f"own_{name}_s": own_s[:, :, i].ravel() for i, name in enumerate(OWN)},
        "ready_s": list(ready_s.reshape(ranks * steps, ready_s.shape[-1])),
        "loss": loss.ravel(),
        "end_s": before_s + step_s.cumsum(axis=1).ravel(),
    }
    table = pa.table(columns)
    if first_step and path.exists():
        earlier = read_table(path)
        table = pa.concat_tables(
            [earlier.filter(pc.field("step") < first_step), table], promote_options="default"
        )
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))


def read_table(path: Path) -> pa.Table:
    """Read the steps of a run, unless the file unpacks to more than any run's steps take.

    Raises: Exception: it is too large, or damaged, which shows in many ways.
    """
    content = io.BytesIO(read_bytes(path))
    found = pq.read_metadata(content)
    if found.num_rows * found.num_columns > LARGEST:
        raise ValueError(f"{found.num_rows:,} rows of {found.num_columns} columns are too many")
    return pq.read_table(content)
