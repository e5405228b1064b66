"""Compare predictions with the measured cells of a study, without fitting anything to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lab.record.schema import Record, read_record
from lab.settings.names import root_of
from lab.study.grid import Cell

# Settings that decide what a step computes and exchanges; a profile says nothing of it.
ROOTS = (
    *("model", "data", "task", "transform", "exchange", "sync", "overlap", "bucket_mb"),
    *("precision", "tf32", "channels_last", "compile"),
)


def measured_steps(folder: Path, cells: Sequence[Cell]) -> list[tuple[float, ...]]:
    """Return the step time of each repeat that was measured of each cell; () of a cell without.

    Raises:
        ValueError: the folder holds no record, or one that breaks the contract.
    """
    records = [read_record(path) for path in sorted(folder.glob("*/record.json"))]
    if not records:
        raise ValueError(f"measured={folder}: holds no <cell>/record.json")
    times: dict[str, list[float]] = {}
    for record in records:
        if record.status == "done" and record.measure == "throughput" and record.step_s:
            times.setdefault(_of_record(record), []).append(record.step_s.median)
    return [tuple(times.get(_of_cell(cell), ())) for cell in cells]


def comparison(seconds: Sequence[float], predicted_s: float) -> dict[str, Any]:
    """Return the columns of a row whose cell was measured."""
    step_s = median(seconds)
    return {"measured_s": step_s, "error": predicted_s / step_s - 1, "evidence": "measured"}


def summary(rows: Sequence[dict[str, Any]], folder: str) -> str:
    """Say how far predictions are from what was measured."""
    errors = [abs(row["error"]) for row in rows if row["evidence"] == "measured"]
    if not errors:
        return f"measured={folder}: has no cell of these settings"
    return (
        f"against {len(errors)} measured cells of {folder}: median error "
        f"{100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %"
    )


def _of_record(record: Record) -> str:
    point = record.strategy, record.world_size, record.batch_size
    return repr((*point, _work(record.settings)))


def _of_cell(cell: Cell) -> str:
    return repr((cell.strategy, cell.world_size, cell.batch_size, _work(cell.settings)))


def _work(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted((key, value) for key, value in settings.items() if root_of(key) in ROOTS)
