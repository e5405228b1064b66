"""Read the run directories of a study into one `Cell` per run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab.record.schema import Emulation, Record, Scaling, Status, read_record

CONTEXT = ("model", "data", "precision", "device", "machine")


@dataclass(frozen=True)
class Cell:
    """One run: the parts of its record that figures and tables need, under the same names.

    Values that a run did not measure are NaN or empty, and `step_s` is the median alone.

    Attributes:
        series: the strategy, and the settings in which runs of the study differ.
        settings: the variant, and the context that runs must share to be compared.
        final: metrics of the last evaluation by name.
    """

    folder: Path
    status: Status
    error: str
    strategy: str
    series: str
    world_size: int
    batch_size: int
    per_rank_batch_size: int
    scaling: Scaling
    repeat: int
    measure: str
    started_at: str
    variant: Mapping[str, str]
    settings: Mapping[str, str]
    transform: str
    emulation: tuple[Emulation, ...]
    environment: Mapping[str, Any]
    step_s: float
    step_mad_s: float
    samples_per_s: float
    unit: str
    phases_s: Mapping[str, float]
    payload_bytes_per_step: tuple[float, ...]
    messages_per_step: tuple[float, ...]
    gradient_bytes: float
    num_parameters: float
    final: Mapping[str, float]
    evaluations: tuple[Mapping[str, float | None], ...]

    @property
    def name(self) -> str:
        """The cell's folder name."""
        return self.folder.name

    @property
    def fixed_batch_size(self) -> int:
        """The batch size that stays as ranks are added: global if strong, per rank if weak."""
        return self.batch_size if self.scaling == "strong" else self.per_rank_batch_size

    def steps(self) -> pd.DataFrame | None:
        """Read steps.parquet, one row per rank and step; None if there is no such file."""
        path = self.folder / "steps.parquet"
        return pd.read_parquet(path) if path.is_file() else None


@dataclass(frozen=True)
class Study:
    """All cells of a study folder, and the names of cells that left no record."""

    folder: Path
    name: str
    cells: tuple[Cell, ...]
    missing: tuple[str, ...]


def load_study(folder: Path) -> Study:
    """Read every `record.json` one level below `folder`.

    A sub-folder that holds neither a record nor the tables this package writes is a cell that
    was killed, and is named in `missing`.

    Raises:
        ValueError: no such folder, no record in it, or a record that breaks the contract.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a study folder such as runs/demo")
    below = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    records = {p: read_record(p / "record.json") for p in below if (p / "record.json").is_file()}
    if not records:
        raise ValueError(f"{folder}: holds no <cell>/record.json; give a study folder of runs")
    settings = {path: _settings(record) for path, record in records.items()}
    varying = _varying(list(settings.values()))
    cells = [
        _cell(path, record, settings[path], _series(record, settings[path], varying))
        for path, record in records.items()
    ]
    names = {record.study or folder.name for record in records.values()}
    missing = [p.name for p in below if p not in records and not (p / "summary.csv").is_file()]
    return Study(folder, ", ".join(sorted(names)), tuple(cells), tuple(missing))


def _settings(record: Record) -> dict[str, str]:
    """Collect overrides, and the settings that comparable runs must share."""
    context = {
        "model": record.model,
        "data": record.data,
        "precision": record.precision,
        "device": record.device,
        "machine": _machine(record),
    }
    return record.variant | {key: value for key, value in context.items() if value is not None}


def _machine(record: Record) -> str | None:
    """Name the machine: runs on others of the same device type are not comparable."""
    gpus = record.environment.get("gpus") if record.device == "cuda" else None
    return gpus[0] if gpus else record.environment.get("cpu")


def _varying(settings: list[dict[str, str]]) -> list[str]:
    """List the settings that tell series apart. A missing context is unknown, not different."""
    keys = sorted({key for one in settings for key in one})
    values = {key: {one.get(key) for one in settings} for key in keys}
    return [key for key in keys if len(values[key] - ({None} if key in CONTEXT else set())) > 1]


def _series(record: Record, settings: Mapping[str, str], varying: list[str]) -> str:
    parts = [f"{key}={settings[key]}" for key in varying if key in settings]
    return " ".join([record.strategy, *parts])


def _cell(folder: Path, record: Record, settings: Mapping[str, str], series: str) -> Cell:
    return Cell(
        folder=folder,
        status=record.status,
        error=record.error or "",
        strategy=record.strategy,
        series=series,
        world_size=record.world_size,
        batch_size=record.batch_size,
        per_rank_batch_size=record.per_rank_batch_size,
        scaling=record.scaling,
        repeat=record.repeat,
        measure=record.measure,
        started_at=record.started_at or "",
        variant=record.variant,
        settings=settings,
        transform=record.transform or "",
        emulation=tuple(record.emulation),
        environment=record.environment,
        step_s=number(record.step_s and record.step_s.median),
        step_mad_s=number(record.step_s and record.step_s.mad),
        samples_per_s=number(record.samples_per_s),
        unit=record.unit,
        phases_s={key: number(value) for key, value in record.phases_s.items()},
        payload_bytes_per_step=tuple(record.payload_bytes_per_step or ()),
        messages_per_step=tuple(record.messages_per_step or ()),
        gradient_bytes=number(record.gradient_bytes),
        num_parameters=number(record.num_parameters),
        final={name: number(value) for name, value in record.final.items()},
        evaluations=tuple(record.evaluations),
    )


def number(value: float | None) -> float:
    """Convert a value to float; null becomes NaN."""
    return math.nan if value is None else float(value)
