"""Measured cells that have the settings of predicted ones, and the errors of these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lab.settings.names import root_of
from lab.study.grid import Cell

if TYPE_CHECKING:
    from lab.record.schema import Record

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
    from lab.record.schema import read_record  # with scipy, which settings do not need

    records = [read_record(path) for path in sorted(folder.glob("*/record.json"))]
    if not records:
        raise ValueError(f"measured={folder} contains no <cell>/record.json; give a study folder")
    times: dict[str, list[float]] = {}
    for record in records:
        if record.status == "done" and record.measure == "throughput" and record.step_s:
            times.setdefault(_point(record), []).append(record.step_s.median)
    return [tuple(times.get(_point(cell), ())) for cell in cells]


def comparison(seconds: Sequence[float], predicted_s: float) -> dict[str, Any]:
    """Return the columns of a row whose cell was measured."""
    step_s = median(seconds)
    return {"measured_s": step_s, "error": predicted_s / step_s - 1, "evidence": "measured"}


def _point(of: Record | Cell) -> str:
    """Return what a measured cell and a predicted one must have in common."""
    work = sorted((key, value) for key, value in of.settings.items() if root_of(key) in ROOTS)
    return repr((of.strategy, of.world_size, of.batch_size, work))
