"""The run directories of a study, read into one `Cell` per run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

PHASES = ("data", "forward", "backward", "exchange", "update")
STATUSES = ("done", "failed", "oom", "timeout", "interrupted")
SCALINGS = ("strong", "weak")
CONTEXT = ("model", "data", "precision", "device", "machine")
IDENTITY = ("strategy", "world_size", "batch_size", "per_rank_batch_size", "scaling")


@dataclass(frozen=True)
class Cell:
    """One run as its record tells it; what a failed run did not measure is NaN or empty.

    Attributes:
        variant: what was set beside a study's axes.
        settings: that, and the context that runs must share to be compared.
    """

    folder: Path
    status: str
    error: str
    strategy: str
    series: str
    world_size: int
    batch: int
    scaling: str
    repeat: int
    measure: str
    started_at: str
    variant: Mapping[str, str]
    settings: Mapping[str, str]
    transform: str
    emulation: str
    environment: Mapping[str, Any]
    step_s: float
    step_mad_s: float
    images_per_s: float
    phases_s: Mapping[str, float]
    payload_bytes: tuple[float, ...]
    messages: tuple[float, ...]
    gradient_bytes: float
    num_parameters: float
    accuracy: float
    evaluations: tuple[Mapping[str, float], ...]

    @property
    def name(self) -> str:
        """The cell's folder name."""
        return self.folder.name

    def steps(self) -> pd.DataFrame | None:
        """The rows of steps.parquet (one per rank and step), or None where there is no file."""
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
    records = {p: _read(p / "record.json") for p in below if (p / "record.json").is_file()}
    if not records:
        raise ValueError(f"{folder}: holds no <cell>/record.json; give a study folder of runs")
    settings = {path: _settings(record) for path, record in records.items()}
    varying = _varying(list(settings.values()))
    cells = [
        _cell(path, record, settings[path], _series(record, settings[path], varying))
        for path, record in records.items()
    ]
    names = {str(record.get("study") or folder.name) for record in records.values()}
    missing = [p.name for p in below if p not in records and not (p / "summary.csv").is_file()]
    return Study(folder, ", ".join(sorted(names)), tuple(cells), tuple(missing))


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}: holds a {type(record).__name__}; a record is one JSON object")
    _one_of(path, "status", record.get("status"), STATUSES)
    for key in IDENTITY if record["status"] == "done" else ():
        if record.get(key) is None:
            raise ValueError(f"{path}: {key}=null; the record of a finished run must give it")
    if record.get("scaling") is not None:
        _one_of(path, "scaling", record["scaling"], SCALINGS)
    return record


def _one_of(path: Path, key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{path}: {key}={value!r}; allowed are {', '.join(allowed)}")


def _settings(record: Mapping[str, Any]) -> dict[str, str]:
    """What was overridden, and what two runs must share to be compared at all."""
    known = {**record, "machine": _machine(record)}
    return _variant(record) | {
        key: str(known[key]) for key in CONTEXT if known.get(key) is not None
    }


def _variant(record: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in (record.get("variant") or {}).items()}


def _machine(record: Mapping[str, Any]) -> str | None:
    """What computed: two machines share a device type, but not their times."""
    environment = record.get("environment") or {}
    gpus = environment.get("gpus") if record.get("device") == "cuda" else None
    return gpus[0] if gpus else environment.get("cpu")


def _varying(settings: list[dict[str, str]]) -> list[str]:
    """Settings that tell series apart. A lacking context is unknown, not another value."""
    keys = sorted({key for one in settings for key in one})
    values = {key: {one.get(key) for one in settings} for key in keys}
    return [key for key in keys if len(values[key] - ({None} if key in CONTEXT else set())) > 1]


def _series(record: Mapping[str, Any], settings: Mapping[str, str], varying: list[str]) -> str:
    parts = [f"{key}={settings[key]}" for key in varying if key in settings]
    return " ".join([str(record.get("strategy") or "unknown"), *parts])


def _cell(
    folder: Path, record: Mapping[str, Any], settings: Mapping[str, str], series: str
) -> Cell:
    step = record.get("step_s") or {}
    scaling = record.get("scaling") or "strong"
    batch = record.get("batch_size" if scaling == "strong" else "per_rank_batch_size")
    return Cell(
        folder=folder,
        status=record["status"],
        error=str(record.get("error") or ""),
        strategy=str(record.get("strategy") or "unknown"),
        series=series,
        world_size=int(record.get("world_size") or 0),
        batch=int(batch or 0),
        scaling=scaling,
        repeat=int(record.get("repeat") or 0),
        measure=str(record.get("measure") or "throughput"),
        started_at=str(record.get("started_at") or ""),
        variant=_variant(record),
        settings=settings,
        transform=_named(record.get("transform")),
        emulation=_named(record.get("emulation")),
        environment=record.get("environment") or {},
        step_s=number(step.get("median")),
        step_mad_s=number(step.get("mad")),
        images_per_s=number(record.get("images_per_s")),
        phases_s={key: number(value) for key, value in (record.get("phases_s") or {}).items()},
        payload_bytes=tuple(number(v) for v in record.get("payload_bytes_per_step") or ()),
        messages=tuple(number(v) for v in record.get("messages_per_step") or ()),
        gradient_bytes=number(record.get("gradient_bytes")),
        num_parameters=number(record.get("num_parameters")),
        accuracy=number((record.get("final") or {}).get("accuracy")),
        evaluations=tuple(record.get("evaluations") or ()),
    )


def _named(value: object) -> str:
    """The value, or nothing where a record says null or "none"."""
    return "" if value in (None, "", "none") else str(value)


def number(value: float | None) -> float:
    """The value as a float; NaN where a record says null."""
    return math.nan if value is None else float(value)
