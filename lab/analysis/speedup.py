"""Speedup, efficiency and exposed communication of every point of a study.

    strong scaling:  S(N, B) = T(1, B) / T(N, B)          B: global batch
    weak scaling:    S(N, b) = N * T(1, b) / T(N, b)      b: batch of one rank
    efficiency:      S / N
    exposed:         T(strategy, N, B) - T(none, N, B), of the same model

T is the median over timed steps of the maximum over ranks, and over repeats the geometric mean.
Only throughput runs count, and baseline and point are paired by repeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lab.analysis.points import (
    Point,
    own_baseline,
    points_of,
    reference,
    same_work,
    shared_baseline,
)
from lab.analysis.records import Cell, Study
from lab.draw.looks import order
from lab.measure.intervals import (
    UNKNOWN,
    Interval,
    geometric_mean,
    of_difference,
    of_level,
    of_ratio,
)
from lab.measure.spans import PHASES
from lab.record.schema import STATUSES, Scaling, worded

CEILING = "none"


@dataclass(frozen=True)
class Row:
    """The statistics of a point. Times are in seconds; NaN means not measured.

    Attributes:
        context, hosts: see Point.context and Cell.hosts.
        one_rank: the series whose run of one rank is this series': its own, or if that was not
            measured one that computes the same there; empty if there is none.
        steps_s: step time by repeat.
        speedups: speedup by repeat.
        unit, prediction: names of one sample, and of each of its predictions_per_sample.
        flops_per_s, mfu: of the record, the median over repeats.
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
    steps_s: Mapping[int, float]
    speedups: Mapping[int, float]
    step_mad_s: float
    samples_per_s: Interval
    flops_per_s: float
    mfu: float
    unit: str
    prediction: str
    predictions_per_sample: int
    baseline: str
    one_rank: str
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
    context: tuple[object, ...]
    hosts: Mapping[str, str]

    @property
    def step_s(self) -> float:
        """The geometric mean of the step time over repeats."""
        return geometric_mean(list(self.steps_s.values()))

    @property
    def fixed_batch_size(self) -> int:
        """The batch size that stays as ranks are added: global if strong, per rank if weak."""
        return self.batch_size if self.scaling == "strong" else self.per_rank_batch_size


def table(study: Study, baseline: str | None = None) -> list[Row]:
    """Compute one row per series, scaling, world size and batch, in reading order.

    Args:
        study: the records.
        baseline: the strategy whose 1-rank runs speedup is measured from. By default `none`, or
            each series' own 1-rank runs where the study has none of `none`; a series without its
            own takes those of one that computes the same on one rank.

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
        _row(
            point,
            own_baseline(points, point),
            _baseline(points, point, named),
            _ceiling(points, point),
        )
        for point in points
    ]


def shared_runs(rows: Iterable[Row]) -> str:
    """Say whose runs of one rank count for other series as well; empty if none do."""
    users: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.one_rank not in ("", row.series):
            users.setdefault(row.one_rank, {})[row.series] = None
    return "; ".join(
        f"N=1 of {name} is shared by {', '.join(others)}: the same computation on one rank"
        for name, others in users.items()
    )


def unit_of(rows: Iterable[Row]) -> str:
    """Return the unit that all measured rows share, in the singular, or "sample"."""
    units = {row.unit for row in rows if row.num_repeats}
    return units.pop() if len(units) == 1 else "sample"


def prediction_of(rows: Iterable[Row]) -> tuple[str, int]:
    """Return the name and the number per sample of the predictions of all measured rows.

    The number is 1 if they differ.
    """
    kinds = {(row.prediction, row.predictions_per_sample) for row in rows if row.num_repeats}
    return kinds.pop() if len(kinds) == 1 else ("prediction", 1)


def _baseline(points: list[Point], point: Point, strategy: str | None) -> Point | None:
    """Find the one-rank point; a transform makes another model, whose speedup is over its own."""
    if strategy is not None and not point.one.transform:
        named = reference(points, point, strategy, 1)
        return named or shared_baseline(points, point, strategy)
    return own_baseline(points, point)


def _ceiling(points: list[Point], point: Point) -> Point | None:
    """Find the point that does the same work without any exchange; one rank exchanges nothing."""
    if point.one.world_size == 1:
        return None
    return same_work(points, point, CEILING, point.one.world_size)


def _row(point: Point, alone: Point | None, base: Point | None, ceiling: Point | None) -> Row:
    one, done = point.one, point.done("throughput")
    factor = one.world_size if one.scaling == "weak" else 1
    speedup = _paired(of_ratio, base, point).scaled(factor)
    base_s, own_s = base.step_s() if base else {}, point.step_s()
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
        steps_s=own_s,
        speedups={r: factor * base_s[r] / own_s[r] for r in sorted(base_s.keys() & own_s.keys())},
        step_mad_s=_median(cell.step_mad_s for cell in done.values()),
        samples_per_s=of_level(_known(c.samples_per_s for c in done.values())),
        flops_per_s=_median(cell.flops_per_s for cell in done.values()),
        mfu=_median(cell.mfu for cell in done.values()),
        unit=one.unit,
        prediction=one.prediction,
        predictions_per_sample=one.predictions_per_sample,
        baseline=base.one.series if base else "",
        one_rank=alone.one.series if alone else "",
        speedup=speedup,
        efficiency=speedup.scaled(1 / one.world_size),
        exposed_exchange_s=_paired(of_difference, point, ceiling),
        payload_max_bytes=max(payload, default=math.nan),
        payload_min_bytes=min(payload, default=math.nan),
        num_parameters=_median(cell.num_parameters for cell in every),
        final=_final(every),
        transform=one.transform,
        emulation="; ".join(sorted({worded(cell.emulation) for cell in every} - {""})),
        phases_s=_phases(point),
        statuses={name: sum(c.status == name for c in point.cells) for name in STATUSES},
        settings=one.settings,
        context=point.context(),
        hosts=one.hosts,
    )


def _paired(
    statistic: Callable[..., Interval], first: Point | None, second: Point | None
) -> Interval:
    if first is None or second is None:
        return UNKNOWN
    a, b = first.step_s(), second.step_s()
    shared = sorted(a.keys() & b.keys())
    return statistic([a[r] for r in shared], [b[r] for r in shared])


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
