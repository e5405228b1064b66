"""The values behind a page, as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from lab.claims.verdicts import Verdict
from lab.settings.whole import write_atomically
from lab.simulate.score import ScoredCell

CLAIM = ("claim", "kind", "where", "quantity", "published", "predicted", "predicted_lo")
CLAIM += ("predicted_hi", "measured", "measured_lo", "measured_hi", "num_repeats", "verdict")
CELL = ("conditions", "strategy", "profile", "world_size", "batch_size", "evidence")
CELL += ("repeat", "measured_s", "predicted_s", "measured_exposed_s", "predicted_exposed_s")


def write_claims(verdicts: Iterable[Verdict], path: Path) -> None:
    """Write a line per claim; empty fields are not known."""
    _write(path, CLAIM, [_claim(verdict) for verdict in verdicts])


def write_cells(cells: Iterable[ScoredCell], path: Path) -> None:
    """Write a line per cell and repeat, seconds of a step; exposed: of the median over repeats."""
    rows = [
        [
            *(cell.conditions, cell.strategy, cell.profile, cell.world_size, cell.batch_size),
            *(cell.evidence, repeat, seconds, cell.predicted_s, *cell.exposed_s),
        ]
        for cell in cells
        for repeat, seconds in enumerate(cell.measured_s)
    ]
    _write(path, CELL, rows)


def _claim(verdict: Verdict) -> list[object]:
    claim, measured = verdict.claim, verdict.measured
    return [
        *(claim.says, claim.kind, claim.source, claim.quantity, claim.published),
        *(verdict.predicted, *(verdict.predicted_ends or (None, None))),
        *(measured.mid, measured.lo, measured.hi, verdict.num_repeats, verdict.outcome),
    ]


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            writer.writerows([_field(value) for value in row] for row in rows)

    write_atomically(path, write)


def _field(value: object) -> object:
    """Return the field of a value: numbers to seven digits, nothing for what is not known."""
    if isinstance(value, float):
        return f"{value:.7g}" if math.isfinite(value) else None
    return value
