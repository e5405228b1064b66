"""The points of a study: their speedup, efficiency and exposed communication, and which lead.

    strong scaling:  S(N, B) = T(1, B) / T(N, B)          B: global batch
    weak scaling:    S(N, b) = N * T(1, b) / T(N, b)      b: batch of one rank
    efficiency:      S / N
    exposed:         T(strategy, N, B) - T(none, N, B), of the same model

T is the median over timed steps of the maximum over ranks, and over repeats the geometric mean.
Only throughput runs count, and a point and what it is compared with are paired by repeat.

On one rank, strategies that send gradients as they are have nothing to send, so all of them compute
the same. Their step times differ by noise alone, including what repeats of one cell share: the
noise floor. It limits which strategies can be said to lead, and how two studies compare.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any, Literal

import numpy as np
import pandas as pd

from lab.analysis.records import CONTEXT, LENGTHS, RecordedCell, RecordedStudy, number
from lab.draw.chart import order
from lab.measure import PHASES
from lab.measure.statistics import (
    ENOUGH_REPEATS,
    Interval,
    geometric_mean,
    of_difference,
    of_level,
    of_ratio,
    quantile,
)
from lab.record.schema import STATUSES, Scaling, worded
from lab.settings.names import idle_groups, root_of

CEILING = "none"
ENOUGH_COPIES = 3  # degrees of freedom; fewer would give a floor of any height
ERRORS = 0.04  # share of studies: a little below the promised 5 %, as no noise is quite normal
Place = tuple[str, str, int, int]  # series, scaling, ranks and batch
Times = Mapping[Any, float]  # seconds of a step, by repeat or turn
Finding = Literal["faster", "slower", "not distinguishable", "too few repeats"]


@dataclass(frozen=True, eq=False)
class Point:
    """All runs of one series at one scaling, world size and batch, and their statistics.

    Times are in seconds; NaN means not measured.

    Attributes:
        cells: the runs, finished ones first.
        base: the point of one rank that speedup is measured from.
        single_rank: the point of one rank of this series: its own, or if that was not measured, of
            another series that computes the same there.
        ceiling: the point that does the same work without any exchange.
    """

    cells: tuple[RecordedCell, ...]
    base: Point | None = None
    single_rank: Point | None = None
    ceiling: Point | None = None

    @property
    def one(self) -> RecordedCell:
        """One cell, for properties that all share; a failed cell may lack some."""
        return self.cells[0]

    @property
    def series(self) -> str:
        return self.one.series

    @property
    def label(self) -> str:
        """See RecordedCell.label."""
        return self.one.label

    @property
    def strategy(self) -> str:
        return self.one.strategy

    @property
    def scaling(self) -> Scaling:
        return self.one.scaling

    @property
    def world_size(self) -> int:
        return self.one.world_size

    @property
    def fixed_batch_size(self) -> int:
        """See RecordedCell.fixed_batch_size."""
        return self.one.fixed_batch_size

    @property
    def place(self) -> Place:
        """The values that tell it from the study's others."""
        one = self.one
        return one.series, one.scaling, one.world_size, one.fixed_batch_size

    @cached_property
    def context(self) -> tuple[object, ...]:
        """The values that runs to be compared share: scaling, batch, model, machine, threads."""
        one = self.one
        kept = [one.settings.get(key) for key in (*CONTEXT, "threads")]
        work = one.scaling, one.fixed_batch_size, one.transform, one.profile
        return *work, *kept, *one.hosts.items()

    def done(self, measure: str) -> dict[int, RecordedCell]:
        """Map repeats to finished runs."""
        return {c.repeat: c for c in self.cells if c.status == "done" and c.measure == measure}

    @cached_property
    def steps_s(self) -> Mapping[int, float]:
        """Step time by repeat, from throughput runs."""
        done = self.done("throughput")
        return {r: done[r].step_s for r in sorted(done) if not math.isnan(done[r].step_s)}

    @cached_property
    def step_s(self) -> float:
        """The geometric mean of the step time over repeats."""
        return geometric_mean(list(self.steps_s.values()))

    @property
    def num_repeats(self) -> int:
        return len(self.steps_s)

    @property
    def baseline(self) -> str:
        """The series that speedup is measured from; empty if there is none."""
        return self.base.series if self.base else ""

    @property
    def one_rank(self) -> str:
        """The series of `single_rank`; empty if there is none."""
        return self.single_rank.series if self.single_rank else ""

    @cached_property
    def speedups(self) -> Mapping[int, float]:
        """Speedup by repeat."""
        base_s, own_s = self._steps_of(self.base), self.steps_s
        return {r: self._factor * base_s[r] / own_s[r] for r in own_s if r in base_s}

    @cached_property
    def speedup(self) -> Interval:
        return of_ratio(*paired(self._steps_of(self.base), self.steps_s)).scaled(self._factor)

    @property
    def efficiency(self) -> Interval:
        return self.speedup.scaled(1 / self.world_size)

    @cached_property
    def exposed_exchange_s(self) -> Interval:
        return of_difference(*paired(self.steps_s, self._steps_of(self.ceiling)))

    @cached_property
    def samples_per_s(self) -> Interval:
        runs = self.done("throughput").values()
        return of_level(_known(number(cell.record.wall_samples_per_s) for cell in runs))

    @property
    def payload_max_bytes(self) -> float:
        """Bytes of a step, of the rank that sends most."""
        return max(self._payload, default=math.nan)

    @cached_property
    def final(self) -> dict[str, float]:
        """Means over repeats, and so over seeds, of the metrics of last evaluations, by name."""
        cells = (self.done("breakdown") | self.done("throughput")).values()
        names = dict.fromkeys(name for cell in cells for name in cell.record.final)
        values = {n: _known(number(c.record.final.get(n)) for c in cells) for n in names}
        return {name: float(np.mean(each)) if each else math.nan for name, each in values.items()}

    @property
    def emulation(self) -> str:
        """The clauses of all runs; empty if nothing is emulated."""
        return "; ".join(sorted({worded(cell.record.emulation) for cell in self._every} - {""}))

    @cached_property
    def phases_s(self) -> dict[str, float]:
        """Each phase's median over breakdown runs; empty without any."""
        runs = [cell.phases_s for cell in self.done("breakdown").values() if cell.phases_s]
        return {p: _median(run.get(p, math.nan) for run in runs) for p in PHASES} if runs else {}

    @property
    def statuses(self) -> dict[str, int]:
        """The number of runs by status."""
        return {name: sum(c.status == name for c in self.cells) for name in STATUSES}

    def median(self, value: str) -> float:
        """Return the median over finished runs of a value of RecordedCell."""
        return _median(getattr(cell, value) for cell in self.done("throughput").values())

    @staticmethod
    def _steps_of(other: Point | None) -> Mapping[int, float]:
        return other.steps_s if other else {}

    @property
    def _every(self) -> list[RecordedCell]:
        return [*self.done("throughput").values(), *self.done("breakdown").values()]

    @property
    def _payload(self) -> list[float]:
        return [value for cell in self._every for value in cell.payload_bytes_per_step]

    @property
    def _factor(self) -> int:
        """How many times the samples of one rank a step has."""
        return self.world_size if self.scaling == "weak" else 1

    def values(self) -> dict[str, Any]:
        """Return its row of the table: an interval has three columns, a phase and a status one."""
        one = self.one
        return {
            **{"scaling": one.scaling, "series": one.series, "strategy": one.strategy},
            **{"world_size": one.world_size, "batch_size": one.batch_size},
            "per_rank_batch_size": one.per_rank_batch_size,
            "num_repeats": self.num_repeats,
            "num_breakdowns": len(self.done("breakdown")),
            "step_s": self.step_s,
            "step_mad_s": self.median("step_mad_s"),
            **_ends("samples_per_s", self.samples_per_s),
            **{name: self.median(name) for name in ("flops_per_s", "mfu")},
            **{"unit": one.record.unit, "prediction": one.record.prediction},
            "predictions_per_sample": one.record.predictions_per_sample,
            **{"baseline": self.baseline, "one_rank": self.one_rank},
            **_ends("speedup", self.speedup),
            **_ends("efficiency", self.efficiency),
            **_ends("exposed_exchange_s", self.exposed_exchange_s),
            "payload_max_bytes": self.payload_max_bytes,
            "payload_min_bytes": min(self._payload, default=math.nan),
            "num_parameters": _median(cell.num_parameters for cell in self._every),
            **self.final,
            **{"transform": one.transform or "none", "emulation": self.emulation or "none"},
            **{f"{name}_s": seconds for name, seconds in self.phases_s.items()},
            **{f"num_{status}": count for status, count in self.statuses.items()},
            **{key: one.settings.get(key) for key in CONTEXT},
        }


def table(study: RecordedStudy, baseline: str | None = None) -> list[Point]:
    """Return the points of a study, each with those that it is compared with, in reading order.

    Args:
        study: the records.
        baseline: the strategy whose 1-rank runs speedup is measured from. By default `none`, or
            each series' own 1-rank runs where the study has none of `none`; a series without its
            own takes those of one that computes the same on one rank.

    Raises:
        ValueError: no finished 1-rank throughput run of a `baseline` that was asked for.
    """
    points = points_of(study.cells)
    bases = {p.strategy for p in points if p.world_size == 1 and p.steps_s}
    if baseline is not None and baseline not in bases:
        allowed = ", ".join(sorted(bases, key=order)) or "none, because no run on one rank finished"
        raise ValueError(
            f"baseline={baseline}: has no finished run on one rank; allowed: {allowed}"
        )
    named = baseline or (CEILING if CEILING in bases else None)
    return [
        replace(
            point,
            single_rank=own_baseline(points, point),
            base=_baseline(points, point, named),
            ceiling=(
                same_work(points, point, CEILING, point.world_size)
                if point.world_size > 1  # one rank exchanges nothing
                else None
            ),
        )
        for point in points
    ]


def points_of(cells: Iterable[RecordedCell]) -> list[Point]:
    """Group cells by series, scaling, world size and batch, in reading order."""
    groups: defaultdict[tuple[str, int, int, str], list[RecordedCell]] = defaultdict(list)
    for cell in cells:
        if cell.world_size and cell.fixed_batch_size:  # a run may fail before these are known
            key = (cell.scaling, cell.fixed_batch_size, cell.world_size, cell.series)
            groups[key].append(cell)
    keys = sorted(groups, key=lambda key: (*key[:3], order(key[3])))
    return [Point(tuple(sorted(groups[key], key=lambda c: c.status != "done"))) for key in keys]


def frame_of(points: Iterable[Point]) -> pd.DataFrame:
    """Return the tidy table, a row for each point; NaN: not measured."""
    return pd.DataFrame([point.values() for point in points])


def together(points: Iterable[Point]) -> list[list[Point]]:
    """Group the points that compete: those of one context and world size."""
    groups: defaultdict[tuple[object, ...], list[Point]] = defaultdict(list)
    for point in points:
        groups[(point.world_size, *point.context)].append(point)
    return [*groups.values()]


def is_copy(point: Point) -> bool:
    """Return whether this point computes on one rank, and nothing else."""
    return point.world_size == 1 and point.one.adds_nothing


def same_work(points: list[Point], point: Point, strategy: str, world_size: int) -> Point | None:
    """Find the measured point of `strategy` at `world_size` that trains `point`'s model."""
    same = [p for p in points if p.one.transform == point.one.transform]
    return reference(same, point, strategy, world_size, lambda key: key != "transform")


def own_baseline(points: list[Point], point: Point) -> Point | None:
    """Find the measured one-rank point of the same series, or one that computes the same."""
    alike = [p for p in points if p.series == point.series]
    return reference(alike, point, point.strategy, 1) or shared_baseline(points, point)


def shared_baseline(points: list[Point], point: Point, strategy: str | None = None) -> Point | None:
    """Find a measured one-rank point that computes what `point`'s strategy does on one rank.

    There settings of exchange and buckets change nothing (lab.settings.names). None if its
    strategy does something of its own even there.

    Args:
        strategy: look for a point of this one instead.
    """
    if strategy is None and not point.one.adds_nothing:
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
    among them) that count must be `point`'s; the one sharing most settings is taken. Runs of other
    lengths have the same steps.

    Args:
        strategy: None: any. counts: tells by key whether a setting counts.
    """
    want = point.one
    fits = [
        p
        for p in points
        if p.world_size == world_size
        and strategy in (None, p.strategy)
        and (p.scaling, p.fixed_batch_size) == (want.scaling, want.fixed_batch_size)
        and all(
            want.settings.get(key) == value
            for key, value in p.one.settings.items()
            if counts(key) and key not in LENGTHS
        )
        and p.steps_s
    ]
    shared = want.settings.items()
    return max(fits, key=lambda p: len(p.one.settings.items() & shared), default=None)


def _baseline(points: list[Point], point: Point, strategy: str | None) -> Point | None:
    """Find the one-rank point; a transform makes another model, whose speedup is over its own."""
    if strategy is not None and not point.one.transform:
        named = reference(points, point, strategy, 1)
        return named or shared_baseline(points, point, strategy)
    return own_baseline(points, point)


def paired(first: Times, second: Times) -> tuple[list[float], list[float]]:
    """Return the values of the repeats or turns that both have, in the order of the first."""
    shared = [key for key in first if key in second]
    return [first[key] for key in shared], [second[key] for key in shared]


def ratio_of(one: Point, other: Point) -> float:
    """Return the ratio of two points' steps: of the repeats that both have, else of the means."""
    ratio = of_ratio(*paired(one.steps_s, other.steps_s)).mid
    return one.step_s / other.step_s if math.isnan(ratio) else ratio


def _ends(name: str, value: Interval) -> dict[str, float]:
    return {f"{name}_{end}": getattr(value, end) for end in ("lo", "mid", "hi")}


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _median(values: Iterable[float]) -> float:
    known = _known(values)
    return float(np.median(known)) if known else math.nan


def ranked(points: Iterable[Point]) -> list[Point]:
    """List the points that may lead.

    `none` is left out: it is a ceiling that trains no common model. So is a point of too few
    repeats, which nothing could beat, where others have enough.
    """
    running = [point for point in points if point.strategy != CEILING and point.num_repeats]
    return [point for point in running if point.num_repeats >= ENOUGH_REPEATS] or running


def has_ranking(points: Iterable[Point]) -> bool:
    """Return whether any point that may lead has enough repeats to be told apart from others."""
    return any(point.num_repeats >= ENOUGH_REPEATS for point in ranked(points))


def leaders(points: Iterable[Point], floor: float) -> list[str]:
    """List the series of one context and world size that no other has been shown to beat.

    Args:
        points: of which `ranked` ones count.
        floor: see noise_floor; NaN if unknown.
    """
    return leaders_of({point.series: point.steps_s for point in ranked(points)}, floor)


def leaders_of(steps_s: Mapping[str, Times], floor: float = math.nan) -> list[str]:
    """List the series that no other has been shown to beat.

    A series is beaten if another one's paired step times are shorter by more than the noise floor,
    and the interval of their ratio lies below 1. As all pairs are looked at, each interval has the
    level at which any of them errs in at most ERRORS of studies (Bonferroni): so among equal series
    one is beaten in at most 5 %.
    """
    num_pairs = len(steps_s) * (len(steps_s) - 1) // 2
    level = 1 - ERRORS / max(1, num_pairs)
    beaten = {
        slow
        for fast, slow in permutations(steps_s, 2)
        if _finding(of_ratio(*paired(steps_s[fast], steps_s[slow]), level), floor) == "faster"
    }
    return [name for name in steps_s if name not in beaten]


def noise_floor(points: Iterable[Point]) -> float:
    """Return the relative difference that two copies exceed by chance in 5 % of comparisons.

    Copies are one-rank points of the same batch and model; a copy's time is the geometric mean of
    its repeats, whose variance is pooled over groups. NaN if there are too few copies.
    """
    copies = together(point for point in points if is_copy(point) and point.steps_s)
    groups = [[np.mean(np.log(list(p.steps_s.values()))) for p in group] for group in copies]
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < ENOUGH_COPIES:
        return math.nan
    squares = sum(float(np.sum((np.array(group) - np.mean(group)) ** 2)) for group in groups)
    return math.expm1(quantile(freedom) * math.sqrt(2 * squares / freedom))


def floor_text(floor: float) -> str:
    """Describe the noise floor; empty if it is unknown."""
    if math.isnan(floor):
        return ""
    return (
        f"noise floor {100 * floor:.1f} %: repeated one-rank runs differ by this much, so smaller "
        "differences between step times are not significant"
    )


@dataclass(frozen=True)
class Difference:
    """A point that two studies have measured.

    Attributes:
        point: of the second study.
        ratio: its step over the first one's, paired by repeat; at the level of `differences`.
        num_pairs: repeats that both have.
        finding: about the second study.
    """

    point: Point
    ratio: Interval
    num_pairs: int
    finding: Finding


def differences(first: Sequence[Point], second: Sequence[Point], floor: float) -> list[Difference]:
    """Compare the points that two studies share.

    As all points are looked at, each interval has the level at which any of them errs in at most
    ERRORS of pairs of studies (Bonferroni). So of two studies of the same thing one is called
    faster anywhere in at most 5 %.

    Args:
        floor: the larger noise floor of the two (noise_floor); NaN if unknown.
    """
    earlier = {point.place: point for point in first if point.num_repeats}
    shared = [point for point in second if point.num_repeats and point.place in earlier]
    level = 1 - ERRORS / max(1, len(shared))
    found: list[Difference] = []
    for point in shared:
        pairs = paired(point.steps_s, earlier[point.place].steps_s)
        ratio = of_ratio(*pairs, level)
        found.append(Difference(point, ratio, len(pairs[0]), _finding(ratio, floor)))
    return found


def _finding(ratio: Interval, floor: float) -> Finding:
    """Judge the ratio of a step to another's."""
    floor = 0.0 if math.isnan(floor) else floor
    if math.isnan(ratio.lo):
        return "too few repeats"
    if ratio.hi < 1 and 1 / ratio.mid - 1 > floor:
        return "faster"
    if ratio.lo > 1 and ratio.mid - 1 > floor:
        return "slower"
    return "not distinguishable"
