"""The points of a study: its runs by series, scaling, world size and batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lab.analysis.records import Cell
from lab.analysis.series import CONTEXT
from lab.draw.looks import order


@dataclass(frozen=True)
class Point:
    """All runs of one series at one scaling, world size and batch; finished ones first."""

    cells: tuple[Cell, ...]

    @property
    def one(self) -> Cell:
        """One cell, for properties that all share; a failed cell may lack some."""
        return self.cells[0]

    def done(self, measure: str) -> dict[int, Cell]:
        """Map repeats to finished runs."""
        return {c.repeat: c for c in self.cells if c.status == "done" and c.measure == measure}

    def context(self) -> tuple[object, ...]:
        """Return what runs must share to be compared: scaling, batch, model and machine."""
        one = self.one
        kept = [one.settings.get(key) for key in CONTEXT]
        return one.scaling, one.fixed_batch_size, one.transform, *kept, *one.hosts.items()

    def step_s(self) -> dict[int, float]:
        """Map repeats to step times in seconds, from throughput runs."""
        done = self.done("throughput")
        return {r: done[r].step_s for r in sorted(done) if not math.isnan(done[r].step_s)}


def points_of(cells: Iterable[Cell]) -> list[Point]:
    """Group cells by series, scaling, world size and batch, in reading order."""
    groups: dict[tuple[str, int, int, str], list[Cell]] = {}
    for cell in cells:
        if cell.world_size and cell.fixed_batch_size:  # a run may fail before these are known
            key = (cell.scaling, cell.fixed_batch_size, cell.world_size, cell.series)
            groups.setdefault(key, []).append(cell)
    keys = sorted(groups, key=lambda key: (*key[:3], order(key[3])))
    return [Point(tuple(sorted(groups[key], key=_failed))) for key in keys]


def _failed(cell: Cell) -> bool:
    return cell.status != "done"


def same_work(points: list[Point], point: Point, strategy: str, world_size: int) -> Point | None:
    """Find the measured point of `strategy` at `world_size` that trains `point`'s model."""
    same = [p for p in points if p.one.transform == point.one.transform]
    return reference(same, point, strategy, world_size, ignore="transform")


def reference(
    points: list[Point], point: Point, strategy: str, world_size: int, ignore: str = ""
) -> Point | None:
    """Find the measured point of `strategy` that `point` may be compared with.

    It must share scaling and batch, and all its settings (model, data, precision and device
    among them) but `ignore` must be `point`'s; the one sharing most settings is taken.
    """
    want = point.one
    fits = [
        p
        for p in points
        if (p.one.strategy, p.one.world_size) == (strategy, world_size)
        and (p.one.scaling, p.one.fixed_batch_size) == (want.scaling, want.fixed_batch_size)
        and {k: v for k, v in p.one.settings.items() if k != ignore}.items()
        <= want.settings.items()
        and p.step_s()
    ]
    return max(fits, key=lambda p: len(p.one.settings), default=None)
