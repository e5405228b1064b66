"""Speedup, efficiency and exposed communication of every point of a study.


    strong scaling:  S(N, B) = T(1, B) / T(N, B)          B: global batch
    weak scaling:    S(N, b) = N * T(1, b) / T(N, b)      b: batch of one rank
    efficiency:      S / N
    exposed:         T(strategy, N, B) - T(none, N, B), of the same model

T is the median over timed steps of the maximum over ranks. Only throughput runs count, and
baseline and point are paired by repeat.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.analysis.records import Cell, Study
from lab.draw.looks import order
from lab.measure.intervals import UNKNOWN, Interval, of_medians
from lab.measure.spans import PHASES
from lab.record.schema import STATUSES, Scaling, worded

CEILING = "none"


@dataclass(frozen=True)
class Point:
    """All runs of one series at one scaling, world size and batch; finished ones first."""

    cells: tuple[Cell, ...]

    @property
    def one(self) -> Cell:
        """One cell, for properties that all share; a failed cell may lack some."""
        return self.cells[0]

    def done(self, measure: str) -> dict[int, Cell]:
        """Map repeats to finished runs; of two with the same repeat, the later one counts."""
        cells = sorted(self.cells, key=lambda cell: cell.started_at)
        return {c.repeat: c for c in cells if c.status == "done" and c.measure == measure}

    def step_s(self) -> dict[int, float]:
        """Map repeats to step times in seconds, from throughput runs."""
        done = self.done("throughput")
        return {r: done[r].step_s for r in sorted(done) if not math.isnan(done[r].step_s)}


@dataclass(frozen=True)
class Row:
    """The statistics of a point. Times are in seconds; NaN means not measured.

    Attributes:
        unit: name of one sample.
        emulation: the clauses of all its runs; empty if nothing is emulated.
    """

    scaling: Scaling
    series: str
    strategy: str
    world_size: int
    batch_size: int
    per_rank_batch_size: int
    num_repeats: int
    num_breakdowns: int
    step_s: float
    step_mad_s: float
    samples_per_s: Interval
    unit: str
    baseline: str
    speedup: Interval
    efficiency: Interval
    exposed_exchange_s: Interval
    payload_max_bytes: float
    payload_min_bytes: float
    num_parameters: float
    final: Mapping[str, float]
    transform: str
    emulation: str
    phases_s: Mapping[str, float]
    statuses: Mapping[str, int]
    settings: Mapping[str, str]

    @property
    def fixed_batch_size(self) -> int:
        """The batch size that stays as ranks are added: global if strong, per rank if weak."""
        return self.batch_size if self.scaling == "strong" else self.per_rank_batch_size


def table(study: Study, baseline: str | None = None) -> list[Row]:
    """Compute one row per series, scaling, world size and batch, in reading order.

    Args:
        study: the records.
        baseline: the strategy whose 1-rank runs speedup is measured from. By default `none`, or
            each series' own 1-rank runs where the study has none of `none`.

    Raises:
        ValueError: no finished 1-rank throughput run of a `baseline` that was asked for.
    """
    points = points_of(study.cells)
    bases = {p.one.strategy for p in points if p.one.world_size == 1 and p.step_s()}
    if baseline is not None and baseline not in bases:
        allowed = ", ".join(sorted(bases, key=order)) or "none of them: no 1-rank run finished"
        raise ValueError(f"baseline={baseline!r}: has no 1-rank run here; allowed are {allowed}")
    named = baseline or (CEILING if CEILING in bases else None)
    return [
        _row(point, _baseline(points, point, named), _ceiling(points, point)) for point in points
    ]


def leaders(rows: Sequence[Row]) -> list[str]:
    """List the series of one grid point that no other series has been shown to beat.

    A series is left out only if its whole interval lies below another's, so series whose
    intervals overlap stay together, and so does one without an interval. Speedup is compared
    if all rows share a baseline, else samples per second. `none` is left out: it is a ceiling
    that trains no common model.
    """
    running = [row for row in rows if row.strategy != CEILING and row.num_repeats]
    shared = len({row.baseline for row in running}) == 1 and running[0].baseline != ""
    value = {row.series: row.speedup if shared else row.samples_per_s for row in running}
    best = max((v.lo for v in value.values() if not math.isnan(v.lo)), default=-math.inf)
    return [name for name, v in value.items() if not (math.isnan(v.mid) or v.hi < best)]


def unit_of(rows: Iterable[Row]) -> str:
    """Return the unit that all measured rows share, in the singular, or "sample"."""
    units = {row.unit for row in rows if row.num_repeats}
    return units.pop() if len(units) == 1 else "sample"


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


def _baseline(points: list[Point], point: Point, strategy: str | None) -> Point | None:
    if strategy is not None:
        return _reference(points, point, strategy, 1)
    alike = [p for p in points if p.one.series == point.one.series]
    return _reference(alike, point, point.one.strategy, 1)


def _ceiling(points: list[Point], point: Point) -> Point | None:
    """Find the point that does the same work without any exchange."""
    return same_work(points, point, CEILING, point.one.world_size)


def same_work(points: list[Point], point: Point, strategy: str, world_size: int) -> Point | None:
    """Find the measured point of `strategy` at `world_size` that trains `point`'s model."""
    same = [p for p in points if p.one.transform == point.one.transform]
    return _reference(same, point, strategy, world_size, ignore="transform")


def _reference(
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


def _row(point: Point, base: Point | None, ceiling: Point | None) -> Row:
    one, done = point.one, point.done("throughput")
    ratio = _paired(operator.truediv, base, point)
    speedup = ratio.scaled(one.world_size if one.scaling == "weak" else 1)
    every = [*done.values(), *point.done("breakdown").values()]
    payload = [value for cell in every for value in cell.payload_bytes_per_step]
    return Row(
        scaling=one.scaling,
        series=one.series,
        strategy=one.strategy,
        world_size=one.world_size,
        batch_size=one.batch_size,
        per_rank_batch_size=one.per_rank_batch_size,
        num_repeats=len(point.step_s()),
        num_breakdowns=len(point.done("breakdown")),
        step_s=_median(point.step_s().values()),
        step_mad_s=_median(cell.step_mad_s for cell in done.values()),
        samples_per_s=of_medians(np.positive, _known(c.samples_per_s for c in done.values())),
        unit=one.unit,
        baseline=base.one.series if base else "",
        speedup=speedup,
        efficiency=speedup.scaled(1 / one.world_size),
        exposed_exchange_s=_paired(operator.sub, point, ceiling),
        payload_max_bytes=max(payload, default=math.nan),
        payload_min_bytes=min(payload, default=math.nan),
        num_parameters=_median(cell.num_parameters for cell in every),
        final=_final(every),
        transform=one.transform,
        emulation="; ".join(sorted({worded(cell.emulation) for cell in every} - {""})),
        phases_s=_phases(point),
        statuses={name: sum(c.status == name for c in point.cells) for name in STATUSES},
        settings=one.settings,
    )


def _paired(statistic: Callable[..., Any], first: Point | None, second: Point | None) -> Interval:
    if first is None or second is None:
        return UNKNOWN
    a, b = first.step_s(), second.step_s()
    shared = sorted(a.keys() & b.keys())
    return of_medians(statistic, [a[r] for r in shared], [b[r] for r in shared])


def _final(cells: Sequence[Cell]) -> dict[str, float]:
    names = dict.fromkeys(name for cell in cells for name in cell.final)
    return {name: _mean(cell.final.get(name, math.nan) for cell in cells) for name in names}


def _phases(point: Point) -> dict[str, float]:
    """Compute each phase's median over breakdown runs, in seconds; empty without any."""
    runs = [cell.phases_s for cell in point.done("breakdown").values() if cell.phases_s]
    return {p: _median(run.get(p, math.nan) for run in runs) for p in PHASES} if runs else {}


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _median(values: Iterable[float]) -> float:
    known = _known(values)
    return float(np.median(known)) if known else math.nan


def _mean(values: Iterable[float]) -> float:
    known = _known(values)
    return float(np.mean(known)) if known else math.nan
