"""Recorders: where a run's curves go while it runs, besides its own directory."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from lab.record.schema import Record
from lab.settings import checks
from lab.settings.atomic import write_atomically
from lab.settings.secrets import is_secret

CURVES = "curves.csv"  # in a run's directory
WANDB_MODES = ("offline", "online")
Row = dict[str, Any]


class Recorder(Protocol):
    """A place for curves: numbers over steps, by name. Only rank 0 calls it.

    The name of a curve begins with `train/` or `test/` and ends in its unit (`train/step_s`).
    Methods may raise any exception: `Guarded` turns it into a warning.
    """

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        """Begin to record.

        Args:
            directory: the run directory; its name is that of the cell.
            config: all settings of the run.
            first_step: optimizer steps done already. If it is not 0 the run continues, and what an
                earlier start recorded of later steps no longer holds.
        """
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers after `step` optimizer steps. Steps never go back, but may repeat."""
        ...

    def finish(self, record: Record) -> None:
        """Record how the run ended, and close all files."""
        ...


class Guarded:
    """A recorder whose first failure turns it off, with a warning: it never ends a run.

    Args: recorder: None: all calls do nothing.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    @property
    def works(self) -> bool:
        """True if what is logged is recorded."""
        return self._recorder is not None

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        self._try(lambda recorder: recorder.start(directory, study, config, first_step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda recorder: recorder.log(step, values))

    def finish(self, record: Record) -> None:
        self._try(lambda recorder: recorder.finish(record))

    def _try(self, action: Callable[[Recorder], None]) -> None:
        if self._recorder is None:
            return
        try:
            action(self._recorder)
        except (Exception, SystemExit) as error:
            name = type(self._recorder).__name__
            self._recorder = None
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"lab.train: {name} is off: {line}", file=sys.stderr)


class CsvRecorder:
    """Curves as a table: one row per step, one column per curve; empty where there is no value."""

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
            self._columns = [*dict.fromkeys([*(reader.fieldnames or ()), *self._columns])]
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


class TensorBoardRecorder:
    """A scalar per curve, in `tensorboard/` of the run directory: `tensorboard --logdir runs`.

    Raises: ValueError: TensorBoard is not installed.
    """

    def __init__(self) -> None:
        _require_package("tensorboard")
        self._writer: Any = None

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        """Open a new event file; TensorBoard hides what an earlier one has of later steps."""
        from torch.utils.tensorboard import SummaryWriter  # only here: it loads TensorBoard

        purge = first_step + 1 if first_step else None
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, record: Record) -> None:
        self._writer.close()


class WandbRecorder:
    """A Weights & Biases run per cell, grouped by study; the run directory stays complete.

    Args:
        project: name of the wandb project.
        mode: "offline" keeps everything in the run directory, "online" sends it.

    Raises: ValueError: `mode` is neither, or wandb is not installed.
    """

    def __init__(self, project: str, mode: str) -> None:
        checks.one_of("recorder.mode", mode, WANDB_MODES)
        _require_package("wandb")
        self._project = project
        self._mode = mode
        self._run: Any = None

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        import wandb

        with _without_slurm_secrets():
            self._run = wandb.init(
                project=self._project,
                mode=self._mode,  # type: ignore[arg-type]
                dir=str(directory),
                name=directory.name,
                group=study,
                config=config,
                settings=wandb.Settings(silent=True, console="off"),
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, record: Record) -> None:
        """Close the run with the record as its summary."""
        self._run.summary.update(record.to_json())
        self._run.finish()


def _require_package(name: str) -> None:
    """Refuse a recorder whose library is missing before anything is trained."""
    if find_spec(name) is None:
        raise ValueError(f"recorder={name}: needs the package {name}: pip install {name}")


@contextmanager
def _without_slurm_secrets() -> Generator[None]:
    """Hide SLURM's secrets: wandb records all variables of SLURM."""
    found = [name for name in os.environ if name.startswith("SLURM") and is_secret(name)]
    values = {name: os.environ.pop(name) for name in found}
    try:
        yield
    finally:
        os.environ.update(values)
