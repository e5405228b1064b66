"""Read the run directories of a study into one `Cell` per run."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from os.path import realpath
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.series import (
    NEEDS,
    OF_WORK,
    Identity,
    differences,
    identity,
    labels_of,
    labels_of_series,
    named_by_study,
    series_of,
    usual_values,
)
from lab.record.schema import Record, Scaling, Status, read_record
from lab.record.steps import read_table
from lab.settings.errors import one_line
from lab.settings.hints import path_hint
from lab.settings.names import adds_nothing, is_of_strategy, root_of
from lab.settings.storage import DamagedFile

NO_RECORD = "left no record.json"


@dataclass(frozen=True)
class Cell:
    """One run: its record, what tells it from others, and those of its values that many need.

    Of these, values that a run did not measure are NaN or empty, and `step_s` is the median alone.

    Attributes:
        commit: of the lab; empty if it is not known, or its files had been changed.
        adds_nothing: its exchange and sync do nothing on one rank (lab.settings.names).
        series: the strategy, and the settings in which runs of the study differ.
        label: the same in short (labels_of_series), for charts: without the values that most
            series share (Study.usual).
        conditions: of these settings, those that no strategy brings with it.
        profile: the one whose layers model=replay waits for; empty for a real model.
        settings: the settings typed or differing, and the context that runs must share to be
            compared.
    """

    folder: Path
    record: Record
    commit: str
    status: Status
    strategy: str
    adds_nothing: bool
    series: str
    label: str
    world_size: int
    batch_size: int
    per_rank_batch_size: int
    scaling: Scaling
    repeat: int
    measure: str
    conditions: Mapping[str, str]
    profile: str
    settings: Mapping[str, str]
    transform: str
    environment: Mapping[str, Any]
    step_s: float
    step_mad_s: float
    flops_per_s: float
    mfu: float
    phases_s: Mapping[str, float]
    payload_bytes_per_step: tuple[float, ...]
    num_parameters: float

    @property
    def name(self) -> str:
        """The cell's folder name."""
        return self.folder.name

    @property
    def fixed_batch_size(self) -> int:
        """The batch size that stays as ranks are added: global if strong, per rank if weak."""
        return self.batch_size if self.scaling == "strong" else self.per_rank_batch_size

    @property
    def paired_s(self) -> dict[Hashable, float]:
        """Seconds of a step by what was measured next to it: a turn of its start, or a repeat."""
        if turns_s := self.record.turns_s:
            return {(self.record.started_at, at): time for at, time in enumerate(turns_s)}
        return {self.repeat: self.step_s}

    @property
    def hosts(self) -> dict[str, str]:
        """The settings of the emulated cluster by which runs differ."""
        return {k: v for k, v in self.conditions.items() if root_of(k) == "cluster"}

    @property
    def circumstances(self) -> str:
        """The settings of machine, links and arithmetic by which runs differ; empty for none."""
        apart = {k: v for k, v in self.conditions.items() if root_of(k) not in OF_WORK}
        given = {k: v for k, v in apart.items() if v != "None"}
        idle = [k for k, other in NEEDS.items() if other in apart and other not in given]
        return " ".join(f"{key}={value}" for key, value in given.items() if key not in idle)

    def steps(self) -> pd.DataFrame | None:
        """Read steps.parquet, one row per rank and step; None if there is no such file.

        Raises: DamagedFile: it cannot be read.
        """
        path = self.folder / "steps.parquet"
        return read_steps(path) if os.path.lexists(path) else None


@dataclass(frozen=True)
class Study:
    """All cells of a study folder, or of several, and those whose record cannot be read.

    Attributes:
        folder: the first one.
        missing: why a cell is not among them, by its name.
        labels: a name for each of several folders; empty for one.
        machines: descriptions of the machines that `on=...` names; empty if there is one.
        usual: settings that most series share, which their labels leave out.
    """

    folder: Path
    name: str
    cells: tuple[Cell, ...]
    missing: Mapping[str, str]
    labels: Mapping[Path, str] = field(default_factory=dict)
    machines: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, folder: Path) -> str:
        """Name a cell's folder, with its study if there are several."""
        label = self.labels.get(folder.parent)
        return f"{label}/{folder.name}" if label else folder.name

    @property
    def troubles(self) -> list[tuple[str, str, str]]:
        """The name of each cell that did not finish, how it ended, and why."""
        failed = [
            (self.name_of(cell.folder), cell.status, cell.record.error or "no error was recorded")
            for cell in self.cells
            if cell.status != "done"
        ]
        return failed + [(name, "missing", why) for name, why in self.missing.items()]


def read_steps(path: Path) -> pd.DataFrame:
    """Read the steps of a run. DamagedFile: there is no such file, or it holds something else."""
    if not path.exists():
        raise DamagedFile(f"{path}: no such file")
    try:
        steps = read_table(path).to_pandas()
        steps[["rank", "step"]].astype(float)
    except Exception as error:  # damaged bytes fail in many ways
        raise DamagedFile(f"{path}: not a table of steps: {one_line(error)}") from None
    return steps


def commits_of(cells: Iterable[Cell]) -> tuple[str, ...]:
    """List the lab's commits that measured the finished cells; empty if one is not known."""
    commits = {cell.commit for cell in cells if cell.status == "done"}
    return () if "" in commits else tuple(sorted(commits))


def load_study(folder: Path, *more: Path) -> Study:
    """Read every `record.json` one level below each folder, as one study.

    A sub-folder that holds neither a record nor the tables this package writes is a cell that
    was killed: it is named in `missing`, as one whose record is damaged. Studies of several
    machines are told apart by `on=...` (lab.analysis.records).

    Raises:
        ValueError: no such folder, no record in it that can be read, the same folder twice, or two
            finished runs of the same cell and repeat.
    """
    folders = (folder, *more)
    if len({*map(realpath, folders)}) < len(folders):  # resolve() raises where links go round
        raise ValueError(f"{' '.join(map(str, folders))}: the same folder is given twice")
    labels = dict(zip(folders, labels_of(folders), strict=True)) if more else {}
    found = {path: record for each in folders for path, record in _records_below(each).items()}
    records = {path: record for path, record in found.items() if isinstance(record, Record)}
    missing = {path: why for path, why in found.items() if isinstance(why, str)}
    identities = [identity(record) for record in records.values()]
    differing, machines = differences(identities), dict[str, str]()
    if more:
        differing, machines = named_by_study(differing, [labels[path.parent] for path in records])
    runs = [(who.strategy, each) for who, each in zip(identities, differing, strict=True)]
    usual = usual_values(runs)
    short = labels_of_series(runs, usual)
    each_cell = zip(records.items(), identities, differing, strict=True)
    cells = tuple(_cell(*read, who, values, short) for read, who, values in each_cell)
    names = sorted({record.study or path.parent.name for path, record in records.items()})
    study = Study(folder, ", ".join(names), cells, {}, labels, machines, usual)
    _refuse_copies(study)
    return replace(study, missing={study.name_of(path): why for path, why in missing.items()})


def _records_below(folder: Path) -> dict[Path, Record | str]:
    """Read the records of a study's cells by their folders; of a cell without one, say why."""
    if not folder.is_dir():
        is_there, otherwise = folder.exists(), "give a study folder such as runs/demo"
        hint = otherwise if is_there else path_hint(folder, otherwise)
        raise ValueError(f"{folder}: {'is a file' if is_there else 'no such folder'}; {hint}")
    below = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    found: dict[Path, Record | str] = {}
    for path in below:
        if (path / "record.json").is_file():
            try:
                found[path] = record = read_record(path / "record.json")
            except (ValueError, OSError) as error:
                found[path] = str(error)
            else:
                if flaw := _flaw(record):
                    found[path] = f"{path / 'record.json'}: {flaw}"
        elif not (path / "summary.csv").is_file():
            found[path] = NO_RECORD
    if not any(isinstance(record, Record) for record in found.values()):
        unread = next((why for why in found.values() if why != NO_RECORD), "")
        raise ValueError(unread or f"{folder}: contains no <cell>/record.json; give a study folder")
    return found


def _flaw(record: Record) -> str:
    """Name a value that no run can have, and that tables would divide by or leave out."""
    values: dict[str, float | None] = {
        "step_s.median": record.step_s and record.step_s.median,
        "wall_samples_per_s": record.wall_samples_per_s,
    }
    if record.status == "done":  # others may have ended before these were known
        values |= {"world_size": record.world_size, "batch_size": record.batch_size}
        values["per_rank_batch_size"] = record.per_rank_batch_size
    wrong = (k for k, v in values.items() if v is not None and not 0 < v < math.inf)
    return next((f"{key}={values[key]:g}: must be above 0 and finite" for key in wrong), "")


def _refuse_copies(study: Study) -> None:
    """Refuse runs that cannot be told apart: which of them counts would be chance."""
    seen: dict[tuple[Any, ...], Cell] = {}
    for cell in (cell for cell in study.cells if cell.status == "done"):
        point = cell.series, cell.scaling, cell.batch_size, cell.world_size
        other = seen.setdefault((*point, cell.measure, cell.repeat), cell)
        if other is not cell:
            raise ValueError(
                f"{study.folder}: {study.name_of(other.folder)} and {study.name_of(cell.folder)} "
                f"are the same cell, repeat={cell.repeat}; remove one, or measure it again with "
                "another repeat=..."
            )


def _cell(
    folder: Path,
    record: Record,
    who: Identity,
    differing: Mapping[str, str],
    labels: Mapping[tuple[str, ...], str],
) -> Cell:
    series = series_of(record.strategy, differing)
    return Cell(
        folder=folder,
        record=record,
        commit="" if record.git_commit.get("dirty") else record.git_commit.get("commit") or "",
        status=record.status,
        strategy=record.strategy,
        adds_nothing=adds_nothing(who.class_of("exchange"), who.class_of("sync")),
        series=" ".join(series),
        label=labels[series],
        world_size=record.world_size,
        batch_size=record.batch_size,
        per_rank_batch_size=record.per_rank_batch_size,
        scaling=record.scaling,
        repeat=record.repeat,
        measure=record.measure,
        conditions={k: v for k, v in differing.items() if not is_of_strategy(k)},
        profile=who.resolved.get("model.profile.name", ""),
        settings={**differing, **who.typed},
        transform=record.transform or "",
        environment=record.environment,
        step_s=number(record.step_s and record.step_s.median),
        step_mad_s=number(record.step_s and record.step_s.mad),
        flops_per_s=number(record.flops_per_s),
        mfu=number(record.mfu),
        phases_s={key: number(value) for key, value in record.phases_s.items()},
        payload_bytes_per_step=tuple(record.payload_bytes_per_step or ()),
        num_parameters=number(record.num_parameters),
    )


def number(value: float | None) -> float:
    """Convert a value to float; null becomes NaN."""
    return math.nan if value is None else float(value)
