"""The run directory: the contract between a run and everything that reads it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lab.measure.clock import PHASES
from lab.record.files import write_atomically, write_json

SCHEMA = 1


class RunDirectory:
    """`<runs_dir>/<study>/<cell>/`, written by rank 0 alone but for each rank's checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def claim(cls, parent: Path, cell: str | None, name: str, resume: bool) -> RunDirectory:
        """Find the directory of a new run, or of the one to continue.

        A `cell` the user named may not hold a finished run; a `name` made up for him is numbered
        until it is free. What is already recorded is never written over.

        Raises:
            ValueError: the directory cannot be created or written, or is taken.
        """
        path = parent / (cell or name)
        number = 1
        while not cell and not resume and path.exists():
            number += 1
            path = parent / f"{name}-{number}"
        record = path / "record.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / ".writable").touch()
            (path / ".writable").unlink()
        except OSError as error:
            raise ValueError(f"runs_dir: cannot write {path}: {error.strerror}") from None
        if record.exists() and not resume:
            raise ValueError(
                f"cell={cell}: {path} already holds a record; choose another cell, or resume=auto"
            )
        return cls(path)

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
            self.path.rmdir()

    def write_config(self, yaml: str) -> None:
        """The resolved configuration."""
        write_atomically(self.path / "config.yaml", lambda path: path.write_text(yaml))

    def write_record(self, record: dict[str, Any]) -> None:
        """The whole run in one object; the last thing a run writes."""
        write_json(self.record_path, {"schema": SCHEMA, **record})

    def write_steps(
        self,
        first_step: int,
        before_s: float,
        num_warmup: int,
        step_s: np.ndarray,
        phase_s: np.ndarray,
        loss: np.ndarray,
    ) -> None:
        """One row per rank and step.

        Args:
            first_step: number of the first step. In a resumed run it is not 0: earlier rows stay.
            before_s: training time before it.
            num_warmup: steps at the start that no statistic counts.
            step_s, loss: [ranks, steps].
            phase_s: [ranks, steps, phases]; NaN where nothing was marked.
        """
        ranks, steps = step_s.shape
        columns = {
            "rank": np.repeat(np.arange(ranks, dtype=np.int32), steps),
            "step": np.tile(np.arange(first_step, first_step + steps, dtype=np.int64), ranks),
            "timed": np.tile(np.arange(steps) >= num_warmup, ranks),
            "step_s": step_s.ravel(),
            **{f"{name}_s": phase_s[:, :, i].ravel() for i, name in enumerate(PHASES)},
            "loss": loss.ravel(),
            "end_s": before_s + step_s.cumsum(axis=1).ravel(),
        }
        table = pa.table(columns)
        final = self.path / "steps.parquet"
        if first_step and final.exists():
            earlier = pq.read_table(final)
            table = pa.concat_tables([earlier.filter(pc.field("step") < first_step), table])
        write_atomically(final, lambda path: pq.write_table(table, path))
