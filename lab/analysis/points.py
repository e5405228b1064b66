"""The points of a study: its runs by series, scaling, world size and batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lab.analysis.records import Cell
from lab.analysis.series import CONTEXT
from lab.draw.looks import order
from lab.settings.names import adds_nothing, idle_groups, root_of


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
        """Return what runs must share to be compared: scaling, batch, model, machine, threads."""
        one = self.one
        kept = [one.settings.get(key) for key in (*CONTEXT, "threads")]
        work = one.scaling, one.fixed_batch_size, one.transform, one.profile
        return *work, *kept, *one.hosts.items()

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


def is_copy(point: Point) -> bool:
    """Return whether this point computes on one rank, and nothing else."""
    return point.one.world_size == 1 and adds_nothing(point.one.exchange, point.one.sync)


def same_work(points: list[Point], point: Point, strategy: str, world_size: int) -> Point | None:
    """Find the measured point of `strategy` at `world_size` that trains `point`'s model."""
    same = [p for p in points if p.one.transform == point.one.transform]
    return reference(same, point, strategy, world_size, lambda key: key != "transform")


def own_baseline(points: list[Point], point: Point) -> Point | None:
    """Find the measured one-rank point of the same series, or one that computes the same."""
    alike = [p for p in points if p.one.series == point.one.series]
    return reference(alike, point, point.one.strategy, 1) or shared_baseline(points, point)


def shared_baseline(points: list[Point], point: Point, strategy: str | None = None) -> Point | None:
    """Find a measured one-rank point that computes what `point`'s strategy does on one rank.

    There settings of exchange and buckets change nothing (lab.settings.names). None if its
    strategy does something of its own even there.

    Args:
        strategy: look for a point of this one instead.
    """
    if strategy is None and not adds_nothing(point.one.exchange, point.one.sync):
        return None
    idle = idle_groups(point.one.settings.get("compile"))
    copies = [p for p in points if is_copy(p) and p.one.transform == point.one.transform]
    return reference(copies, point, strategy, 1, lambda key: root_of(key) not in idle)


def reference(
    points: list[Point],
    point: Point,
    strategy: str | None,
    world_size: int,
    counts: Callable[[str], bool] = lambda _: True,
) -> Point | None:
    """Find the measured point of `strategy` that `point` may be compared with.

    It must share scaling and batch, and all its settings (model, data, precision and device
    among them) that count must be `point`'s; the one sharing most settings is taken.

    Args:
        strategy: None: any. counts: tells by key whether a setting counts.
    """
    want = point.one
    fits = [
        p
        for p in points
        if p.one.world_size == world_size
        and strategy in (None, p.one.strategy)
        and (p.one.scaling, p.one.fixed_batch_size) == (want.scaling, want.fixed_batch_size)
        and {k: v for k, v in p.one.settings.items() if counts(k)}.items() <= want.settings.items()
        and p.step_s()
    ]
    return max(fits, key=lambda p: len(p.one.settings), default=None)
