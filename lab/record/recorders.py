"""Recorders: where a run's curves go while it runs, besides its own directory."""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from lab.record.run_directory import OUTPUT
from lab.record.schema import Record
from lab.settings import checks, names
from lab.settings.secrets import is_secret
from lab.settings.storage import write_atomically

CURVES = "curves.csv"  # in a run's directory
WANDB_MODES = ("offline", "online")
WANDB_PROJECT = "scaling-lab"
MLFLOW_PARAMS, MLFLOW_METRICS = 100, 1000  # that a request may hold
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
            print(f"lab.train: {name} is switched off: {line}", file=sys.stderr)


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

    A cell has one run, however often it is interrupted: its id is kept in the run directory.

    Args:
        project, entity, job_type: None: those of WANDB_PROJECT, WANDB_ENTITY and WANDB_JOB_TYPE;
            without these "scaling-lab", wandb's own default, and "train".
        mode: "offline" keeps everything in the run directory, "online" sends it; None: that of
            WANDB_MODE, without it "offline".
        tags: of the run; none: those of WANDB_TAGS.

    Raises: ValueError: `mode` is neither, or wandb is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        mode: str | None = None,
        entity: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        if mode is not None:
            checks.one_of("recorder.mode", mode, WANDB_MODES)
        elif given := os.environ.get("WANDB_MODE"):
            checks.one_of("WANDB_MODE", given, (*WANDB_MODES, "shared", "disabled", "dryrun"))
        _require_package("wandb")
        self._names: dict[str, Any] = {
            "project": project or os.environ.get("WANDB_PROJECT") or WANDB_PROJECT,
            "mode": mode or os.environ.get("WANDB_MODE") or "offline",
            "entity": entity or os.environ.get("WANDB_ENTITY"),
            "job_type": job_type or os.environ.get("WANDB_JOB_TYPE") or "train",
            "tags": [*tags] or None,
        }
        self._directory = Path()
        self._run: Any = None

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        """Begin the cell's run, or go on with it.

        Steps that it has recorded already, after the checkpoint, stay as they were first recorded.
        """
        self._begin(directory, directory.name, group=study, config=config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, record: Record) -> None:
        """Close the run: the record is its summary, the directory's files an artifact."""
        self._run.summary.update(record.to_json())
        self._add_files("run")
        self._run.finish(exit_code=int(record.status != "done"))

    def publish(self, folder: Path, study: str) -> None:
        """Keep the figures and tables in `folder` as an artifact of a study, in a run of its own.

        Raises: Exception: wandb's own, if it cannot be reached.
        """
        self._begin(folder, f"{study} figures", group=study, job_type="figures")
        self._add_files("figures")
        self._run.finish()

    def _begin(self, directory: Path, name: str, **about: Any) -> None:
        import wandb

        self._directory, kept = directory, directory / ".wandb-id"
        with _for_wandb(directory):
            self._run = wandb.init(
                **self._names | about,
                dir=str(directory),
                id=kept.read_text(encoding="utf-8") if kept.exists() else None,
                resume="allow",
                allow_val_change=True,  # as world_size, where an elastic run goes on
                reinit="create_new",  # beside one of the program's own
                name=name,
                settings=wandb.Settings(silent=True, console="off"),
            )
        if not self._run.disabled:
            kept.write_text(self._run.id, encoding="utf-8")

    def _add_files(self, kind: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self._run.id}", kind)
        with _for_wandb(self._directory):
            for path in _files(self._directory):
                artifact.add_file(str(path))
            self._run.log_artifact(artifact)


class MlflowRecorder:
    """An MLflow run per cell, in an experiment named by the study; settings are its parameters.

    MLflow keeps what was recorded of steps after a checkpoint: a resumed run has them twice.

    Args:
        tracking_uri: a server or store; None: that of MLFLOW_TRACKING_URI, or MLflow's own default.
        experiment: None: that of MLFLOW_EXPERIMENT_NAME, without it the study.

    Raises: ValueError: MLflow is not installed.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        _require_package("mlflow")
        self._uri = tracking_uri
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        self._mlflow: Any = None
        self._client: Any = None
        self._directory, self._id = Path(), ""
        self._waiting: list[Any] = []
        self._sent_at = 0.0

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        self._mlflow = import_module("mlflow")  # here: other ranks need none of it
        client = self._client = self._mlflow.MlflowClient(self._uri)
        self._directory, kept = directory, directory / ".mlflow-id"
        if kept.exists():
            self._id = kept.read_text(encoding="utf-8")
            client.update_run(self._id, status="RUNNING")
            return
        name = self._experiment or study
        found = client.get_experiment_by_name(name)
        place = found.experiment_id if found else client.create_experiment(name)
        run = client.create_run(place, run_name=directory.name, tags={"study": study})
        self._id = run.info.run_id
        kept.write_text(self._id, encoding="utf-8")
        param = self._mlflow.entities.Param
        settings = [param(key, str(value)) for key, value in names.flat(config).items()]
        for first in range(0, len(settings), MLFLOW_PARAMS):
            client.log_batch(self._id, params=settings[first : first + MLFLOW_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now, metric = time.time(), self._mlflow.entities.Metric
        self._waiting += [metric(k, float(v), int(1000 * now), step) for k, v in values.items()]
        if now > self._sent_at + 1:  # each is a request, for which training waits
            self._send()

    def finish(self, record: Record) -> None:
        """Close the run, with the directory's files as artifacts."""
        self._send()
        for path in _files(self._directory):
            self._client.log_artifact(self._id, str(path))
        ends = {"done": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._id, ends.get(record.status, "FAILED"))

    def _send(self) -> None:
        for first in range(0, len(self._waiting), MLFLOW_METRICS):
            self._client.log_batch(self._id, self._waiting[first : first + MLFLOW_METRICS])
        self._waiting, self._sent_at = [], time.time()


def _files(directory: Path) -> list[Path]:
    """Return the files of a run: its settings, record and tables, without checkpoints.

    Its output is not among them: a sweep hides the secrets in it only when its ranks have ended.
    """
    files = (p for p in directory.iterdir() if p.is_file() and p.name != OUTPUT)
    return sorted(p for p in files if not p.name.startswith("."))


def _require_package(name: str) -> None:
    """Refuse a recorder whose library is missing before anything is trained."""
    if find_spec(name) is None:
        raise ValueError(f"recorder={name}: needs the package {name}; run pip install {name}")


@contextmanager
def _for_wandb(directory: Path) -> Generator[None]:
    """Hide SLURM's secrets, since wandb records all its variables; keep copies of files here."""
    hidden = [name for name in os.environ if name.startswith("SLURM") and is_secret(name)]
    before = {name: os.environ.pop(name, None) for name in (*hidden, "WANDB_DATA_DIR")}
    os.environ["WANDB_DATA_DIR"] = before["WANDB_DATA_DIR"] or str(directory / "wandb")
    try:
        yield
    finally:
        del os.environ["WANDB_DATA_DIR"]
        os.environ.update({name: value for name, value in before.items() if value is not None})
