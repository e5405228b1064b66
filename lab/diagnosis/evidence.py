"""Evidence from a study's records about where a run of several ranks spends its time."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis.points import CEILING, Point, ratio_of, same_work, shared_baseline
from lab.analysis.records import RecordedCell, RecordedStudy
from lab.analysis.results import Results
from lab.measure import OWN, Span
from lab.measure.statistics import round_means
from lab.measure.stragglers import Slow, Times, stragglers
from lab.record.run_directory import SETTINGS, read_settings
from lab.record.trace import TIMELINE, read_trace
from lab.sync.pattern import Pattern, comparable_phases, pattern_of

OWN_WORK = ("data_s", "forward_s", "backward_s", "update_s")  # columns of steps.parquet
OF_SLOW = ("delay_s", "share", "floor_s")  # figures of a slow rank, beside where it is slow
EXPLAINED = ("throughput", "breakdown")  # runs whose steps take as long as they usually do
OF_EXCHANGE = ("overlap", "bucket_mb", "exchange", "sync")  # settings that do not apply to `none`


@dataclass(frozen=True)
class Evidence:
    """The evidence about one grid point.

    Times are seconds of one step, by rank the median over steps; NaN is unknown.

    Attributes:
        point: the runs that are explained.
        step_s: step time of its throughput runs, or, without any, of its breakdowns.
        one_s: step time of `none` (or of the strategy) on one rank, at the same batch, in the
            repeats of the point.
        ceiling_s: step time of `none` on as many ranks, likewise.
        exposed_s: exposed communication: the step less the ceiling, in pairs of repeats; without a
            ceiling, the breakdown's exchange phase on the rank that waited least.
        input_s: waiting for data, mean over ranks.
        straggler_s: the mean delay of the slowest of the slow ranks. In records without own times:
            the slowest rank's own work less the median of the other ranks'.
        slowest_rank: that rank; -1 is unknown.
        slow: each phase in which a rank is slow, the longest mean delay first.
        backward_s: mean over ranks.
        floor: the study's noise floor (lab.analysis.points).
        codec_s: encoding and decoding in exchanges, mean over ranks.
        payload_bytes, messages: sent in a step by the rank that sent most.
        settings: the run's resolved settings; {} if unknown.
        to_run: commands that would measure the unknown values, by the name of the measurement.
    """

    point: Point
    step_s: float
    one_s: float = math.nan
    ceiling_s: float = math.nan
    exposed_s: float = math.nan
    input_s: float = math.nan
    straggler_s: float = math.nan
    slowest_rank: int = -1
    slow: Sequence[Slow] = ()
    backward_s: float = math.nan
    codec_s: float = math.nan
    noise_floor: float = math.nan
    payload_bytes: float = math.nan
    messages: float = math.nan
    settings: Mapping[str, Any] = field(default_factory=dict)
    to_run: Mapping[str, str] = field(default_factory=dict)

    @property
    def one(self) -> RecordedCell:
        """One run of the point, for properties that all its runs share."""
        return self.point.one

    @property
    def pattern(self) -> Pattern:
        """The pattern of the run's sync: when it exchanged, and in which transfers."""
        return pattern_of(self.settings)

    @property
    def ideal_s(self) -> float:
        """The time of a step whose compute is divided evenly, without any loss."""
        return self.one_s / (self.one.world_size if self.one.scaling == "strong" else 1)

    @property
    def fixed_s(self) -> float:
        """Compute beyond the ideal that neither exchange, input nor a straggler explains."""
        lost = [part for part in (self.input_s, self.straggler_s) if not math.isnan(part)]
        rest = self.step_s - self.exposed_s - self.ideal_s - sum(lost)
        return rest if math.isnan(rest) else max(0.0, rest)


def gather(results: Results, cell: RecordedCell) -> Evidence:
    """Gather the evidence in a study about the grid point of `cell`.

    Raises:
        ValueError: the cell's run failed, or has one rank.
    """
    points = results.points
    point = next(point for point in points if any(each is cell for each in point.cells))
    if cell.status != "done":
        raise ValueError(
            f"{cell.folder}: status={cell.status}: {cell.record.error}; only runs with status=done "
            "can be explained"
        )
    if cell.world_size < 2:
        raise ValueError(f"{cell.folder}: world_size=1: a single rank exchanges nothing")
    settings = _settings(cell)
    breakdowns = list(point.done("breakdown").values())
    step_s = point.step_s if point.steps_s else _median(run.step_s for run in breakdowns)
    if not step_s and cell.measure not in EXPLAINED:
        raise ValueError(
            f"{cell.folder}: measure={cell.measure}: slows steps down; only runs with "
            f"{' or '.join(f'measure={each}' for each in EXPLAINED)} can be explained"
        )
    if not step_s:
        raise ValueError(f"{cell.folder}: step_s=null: no step was timed; see warmup_steps")
    base = (
        point.base  # what tables take the speedup from
        or same_work(points, point, CEILING, 1)
        or same_work(points, point, cell.strategy, 1)
        or shared_baseline(points, point)
    )
    ceiling, pattern = point.ceiling, pattern_of(settings)
    # Backward's waits for the exchange are not the rank's own work.
    telling = [] if pattern.waits_in_backward else breakdowns
    unmarked = list(point.done("throughput").values())
    slow = slow_ranks(unmarked or breakdowns, settings)
    slowest_rank, straggler_s = (
        _slower(telling, ceiling, pattern.every) if slow is None else _slowest(slow)
    )
    # Marks slow a run down, so its times count as shares of its own step.
    scale = step_s / (_median(run.step_s for run in breakdowns) or step_s)
    return Evidence(
        point=point,
        step_s=step_s,
        one_s=_beside(point, base),
        ceiling_s=_beside(point, ceiling),
        exposed_s=_exposed_s(point, telling, pattern.every, scale),
        input_s=scale * _phase_s(breakdowns, "data"),
        straggler_s=straggler_s,
        slowest_rank=slowest_rank,
        slow=tuple(slow or ()),
        backward_s=scale * _phase_s(telling, "backward"),
        codec_s=scale * _codec_s(breakdowns, pattern.every),
        noise_floor=results.noise_floor,
        payload_bytes=max(cell.payload_bytes_per_step, default=math.nan),
        messages=max(cell.record.messages_per_step or (), default=math.nan),
        settings=settings,
        to_run=_to_run(results.study, point, base),
    )


def gather_all(results: Results) -> list[Evidence]:
    """Gather the evidence of every point of a study with several ranks and a timed run.

    Raises:
        ValueError: there is no such point.
    """
    several = [point for point in results.points if point.world_size > 1]
    timed = [
        point.one
        for point in several
        if any(
            not math.isnan(run.step_s) for each in EXPLAINED for run in point.done(each).values()
        )
    ]
    if not timed:
        raise ValueError(
            f"{results.study.folder}: no run on several ranks has finished and timed a step; one "
            "rank has no exchange to explain"
        )
    return [gather(results, one) for one in timed]


def _median(values: Any) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else 0.0


def _beside(point: Point, other: Point | None) -> float:
    """Return another point's step as it is in the repeats of `point`, as tables pair the two."""
    return math.nan if other is None else ratio_of(other, point) * point.step_s


def _exposed_s(point: Point, runs: Sequence[RecordedCell], every: int, scale: float) -> float:
    if point.strategy == CEILING:
        return 0.0
    if not math.isnan(known := point.exposed_exchange_s.mid):
        return max(0.0, known)
    waits = _by_rank(runs, ("exchange_s",), every)
    return scale * float(waits.min()) if len(waits) else math.nan


def _phase_s(breakdowns: Sequence[RecordedCell], name: str) -> float:
    times = [run.phases_s[name] for run in breakdowns if name in run.phases_s]
    return _median(times) if times else math.nan


def _by_rank(runs: Sequence[RecordedCell], columns: Sequence[str], every: int = 1) -> np.ndarray:
    """Return the seconds of a step in `columns`, [ranks]; empty if no run has them.

    That is the mean step of each whole round of `every` steps: its median over rounds, averaged
    over `runs`.
    """
    medians = []
    for run in runs:
        steps = run.steps()
        if steps is not None and {"timed", *columns} <= set(steps.columns):
            timed = steps.query("timed")
            of_round = timed.assign(of=timed[[*columns]].sum(axis=1), round=timed["step"] // every)
            rounds = of_round.groupby(["rank", "round"])["of"].agg(["mean", "size"])
            whole = rounds.query("size == @every")
            medians.append(whole.groupby("rank")["mean"].median().to_numpy())
    same = [one for one in medians if len(one) == len(medians[0])]
    return np.mean(same, axis=0) if same else np.empty(0)


def _slowest(slow: Sequence[Slow]) -> tuple[int, float]:
    """Return the slowest of the slow ranks and its mean delay; -1 and 0 if none is slow."""
    delays = dict[int, float]()
    for each in slow:
        delays[each.rank] = delays.get(each.rank, 0.0) + each.mean_s
    return max(delays.items(), key=lambda pair: pair[1], default=(-1, 0.0))


def _slower(runs: Sequence[RecordedCell], ceiling: Point | None, every: int) -> tuple[int, float]:
    """Return the rank that works longest, and how much longer than the median of the others.

    In `none`, no rank waits for another, so its steps are own work.
    """
    alone = [*ceiling.done("throughput").values()] if ceiling else []
    ranks = _by_rank(alone, ("step_s",))
    if not len(ranks):
        ranks = _by_rank(runs, OWN_WORK, every)
    if len(ranks) < 2:
        return -1, math.nan
    *others, slowest = np.sort(ranks)
    return int(np.argmax(ranks)), float(slowest - np.median(others))


def _codec_s(breakdowns: Sequence[RecordedCell], every: int) -> float:
    """Return the seconds of encoding and decoding per rank and step, from timelines.

    NaN: unknown, as in rounds of more steps than a timeline has.
    """
    paths = [run.folder / TIMELINE for run in breakdowns if (run.folder / TIMELINE).is_file()]
    spans = [span for path in paths for span in _of_whole_rounds(read_trace(path).spans, every)]
    num_steps = sum(span.row == "step" for span in spans)
    coded = [span.end_s - span.start_s for span in spans if span.row == "codec"]
    return sum(coded) / num_steps if num_steps else math.nan


def _of_whole_rounds(spans: Sequence[Span], every: int) -> Sequence[Span]:
    """Return the spans of the steps that make up whole rounds of `every` steps."""
    if every == 1:
        return spans
    steps = {(s.rank, int(s.name.rpartition(" ")[2])): s for s in spans if s.row == "step"}
    sizes = Counter((rank, number // every) for rank, number in steps)
    whole = [step for (rank, at), step in steps.items() if sizes[rank, at // every] == every]
    return [
        span
        for span in spans
        if any(s.rank == span.rank and s.start_s <= span.start_s < s.end_s for s in whole)
    ]


def _settings(cell: RecordedCell) -> dict[str, Any]:
    return read_settings(cell.folder) if (cell.folder / SETTINGS).is_file() else {}


def _to_run(study: RecordedStudy, point: Point, base: Point | None) -> dict[str, str]:
    cell, size = point.one, str(point.world_size)
    own = "name" in (_settings(cell).get("model") or {})  # of a loop that lab.Run recorded

    def command(strategy: str, sizes: str) -> str:
        if not own:
            return sweep_command(study, cell, strategy, sizes)
        ranks = " and ".join(sizes.split(","))
        run = f"lab.Run(study={study.name!r}, strategy={strategy!r}, …)"
        return f"the same loop on {ranks} ranks: {run}"

    lacking = [ranks for ranks, at in (("1", base), (size, point.ceiling)) if at is None]
    commands = {}
    if lacking:
        missing = " and ".join("one rank" if ranks == "1" else "the ceiling" for ranks in lacking)
        commands[missing] = command(CEILING, ",".join(lacking))
    if not point.steps_s:
        commands["its step, unmarked"] = command(cell.strategy, size)
    if not point.done("breakdown") and not own:
        more = "measure=breakdown"
        commands["its phases"] = sweep_command(study, cell, cell.strategy, size, more)
    return commands


def sweep_command(
    study: RecordedStudy, cell: RecordedCell, strategy: str, sizes: str, *more: str
) -> str:
    """Return the command that adds runs comparable with `cell` to the study."""
    folder = study.folder.resolve()
    where = [f"study={folder.name}"]
    if folder.parent.name != "runs":
        where.append(f"runs_dir={folder.parent}")
    settings = [
        f"strategy={strategy}",
        f"world_size={sizes}",
        f"batch_size={cell.fixed_batch_size}",
    ]
    settings += [f"scaling={cell.scaling}"] if cell.scaling != "strong" else []
    settings += [
        f"{key}={value}"
        for key, value in cell.record.variant.items()
        if strategy == cell.strategy or key.split(".")[0] not in OF_EXCHANGE
    ]
    if strategy != cell.strategy and cell.transform:
        settings.append("transform=fc1x1")  # there is no other
    return shlex.join(["python", "-m", "lab.sweep", *where, *settings, *more])


def slow_ranks(runs: Sequence[RecordedCell], settings: Mapping[str, Any]) -> list[Slow] | None:
    """Find the slow ranks that most of the `runs` of a point show.

    Args:
        settings: the runs' composed settings.

    Returns:
        The longest mean delay first, medians over the runs; None: no run has own times.
    """
    found = list[list[Slow]]()
    for run in runs:
        steps = run.steps()
        if steps is not None and f"own_{OWN[0]}_s" in steps.columns:
            times = own_times(steps, pattern_of(settings).every)
            same = comparable_phases(settings, run.payload_bytes_per_step)
            found.append(stragglers(times, run.step_s, same))
    if not found:
        return None
    shown: dict[tuple[int, str], list[Slow]] = {}
    for each in (slow for run in found for slow in run):
        shown.setdefault((each.rank, each.phase), []).append(each)
    agreed = [
        Slow(*key, *(float(median(getattr(slow, name) for slow in same)) for name in OF_SLOW))
        for key, same in shown.items()
        if len(same) > len(found) / 2
    ]
    return sorted(agreed, key=lambda slow: -slow.mean_s)


def own_times(steps: pd.DataFrame, every: int) -> Times:
    """Return seconds of own work in timed steps, or means over rounds: [ranks, steps, OWN]."""
    timed: Any = steps[steps["timed"]]
    timed = timed.sort_values(["rank", "step"])
    if timed.empty:
        return np.empty((0, 0, len(OWN)))
    columns = [f"own_{name}_s" for name in OWN]
    values = timed[columns].to_numpy(float).reshape(timed["rank"].nunique(), -1, len(OWN))
    if every == 1:
        return values
    known = ~np.isnan(values).all(axis=1, keepdims=True)
    filled = np.where(known, np.nan_to_num(values), np.nan)  # most steps exchange nothing
    return round_means(filled, int(timed["step"].min()), every)
