"""Say what a study found: a sentence that anyone understands, three figures, how sure they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lab.analysis.points import CEILING, Place, Point, leaders, paired, ranked, ratio_of
from lab.diagnosis.evidence import Evidence
from lab.diagnosis.rules import Explanation
from lab.diagnosis.view import reason
from lab.draw.text import in_words, number_of, number_text
from lab.measure.statistics import ENOUGH_REPEATS, Interval, of_ratio

# What people use, the most common first.
BASELINES = ("allreduce", "ddp", "horovod", "tree", "overlap")
LIMITS = {
    **{"input": "Waiting for data", "straggler": "A slow rank"},
    **{"exchange": "Exchange", "fixed": "Compute"},
}
LEAST_GAIN = 0.005  # a smaller one would be written as 1.00 times
Explained = Mapping[Place, tuple[Evidence, Explanation]]


@dataclass(frozen=True)
class KeyFigure:
    """A large figure: what it is, its value, and a line on how to read it."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Finding:
    """The outcome of a study, at its most ranks and largest batch.

    Attributes:
        verdict: a sentence for anyone.
        more: sentences on how sure it is, and on what was not told apart.
        figures: the best strategy, its speedup, and what limits it; empty: nothing to judge.
        names: short ones of the points that were judged: the strategy, where this is enough.
        best: the fastest point; None: nothing to judge.
        baseline: the usual strategy at the same place; None: it was not measured, or is the best.
    """

    verdict: str
    more: Sequence[str] = ()
    figures: Sequence[KeyFigure] = ()
    names: Mapping[Place, str] = field(default_factory=dict[Place, str])
    best: Point | None = None
    baseline: Point | None = None


def finding(points: Sequence[Point], floor: float, explained: Explained) -> Finding:
    """Say what is fastest, how sure that is, and what limits it.

    The place is that with the most ranks, of those the largest batch, and of several models or
    links there that with the most series.

    Args:
        floor: the study's noise floor.
        explained: why points take as long as they do.
    """
    running = [point for point in points if point.num_repeats and point.strategy != CEILING]
    if not running:
        of_none = sum(point.num_repeats > 0 for point in points)
        if not of_none:
            others = any(cell.status == "done" for point in points for cell in point.cells)
            return Finding("No throughput run has finished." if others else "No run has finished.")
        only = f"Only strategy={CEILING} was measured, at {number_of(of_none, 'point')}."
        return Finding(f"{only} It exchanges nothing, so there is no exchange to judge.")
    size = max((point.world_size, point.fixed_batch_size) for point in running)
    here = [point for point in running if (point.world_size, point.fixed_batch_size) == size]
    context = Counter(point.context for point in here).most_common(1)[0][0]
    there = [point for point in here if point.context == context]
    first = leaders(there, floor)
    # Of unlike repeats the mean alone may favour one that others beat in pairs.
    here = sorted(ranked(there), key=lambda point: (point.series not in first, point.step_s))
    best = here[0]
    usual = [p for name in BASELINES for p in here if p.strategy == name and p is not best]
    baseline = usual[0] if usual and best.strategy != BASELINES[0] else None
    count = Counter(point.strategy for point in there)
    names = {p.place: p.strategy if count[p.strategy] == 1 else p.label for p in there}
    why = explained.get(best.place)  # one rank has none, nor has a run whose files are damaged
    figures = [_best(best, there, names), _speed(best), *([_limit(*why)] if why else [])]
    few = [names[point.place] for point in there if point not in here]
    too_few = f"Not ranked, with fewer than {ENOUGH_REPEATS} repeats"
    more = [
        *([] if few and len(here) == 1 else _certainty(here, first, names)),
        *([f"{too_few}: {_listed(few)}."] if few else []),
        *_on_fewer_ranks(best, ranked(running), floor),
    ]
    return Finding(_verdict(best, baseline, names), more, figures, names, best, baseline)


def _verdict(best: Point, baseline: Point | None, names: Mapping[Place, str]) -> str:
    name, ranks = names[best.place], number_of(best.world_size, "rank")
    gain = ""
    if baseline and (more := number_text(ratio_of(baseline, best))) != "1.00":
        gain = f"{more} times as fast as with {names[baseline.place]}"
    times = best.speedup.mid
    if math.isnan(times) or best.world_size == 1:
        told = ", ".join(filter(None, (f"{number_text(best.step_s, 1e3)} ms per step", gain)))
        return f"On {ranks}, {name} is the fastest strategy measured: {told}."
    told = ", and ".join(filter(None, (f"{number_text(times)} times as fast as one", gain)))
    if best.speedup.lo <= 1 <= best.speedup.hi:
        unsure = f"The repeats cannot show whether {ranks} train faster than one"
        return f"{unsure}. With {name}, the fastest strategy, they train {told}."
    if times > 1:
        return f"With {name}, {ranks} train {told}."
    fastest = f"With {name}, the fastest strategy, they train {told}."
    return f"{ranks} train no faster than one rank. {fastest}"


def _certainty(
    here: Sequence[Point], first: Sequence[str], names: Mapping[Place, str]
) -> list[str]:
    """Say whether the best of points, the fastest first, may be so by chance.

    Args: first: their leaders.
    """
    best, count = here[0], len(here)
    where = f"{batch_text(best)}, {number_of(best.world_size, 'rank')}"
    if count == 1:
        return [f"Nothing else was measured there ({where})."]
    if best.num_repeats < ENOUGH_REPEATS:
        once = all(point.num_repeats == 1 for point in here)
        runs = "once" if once else f"fewer than {ENOUGH_REPEATS} times"
        return [
            f"Each strategy ran {runs}, so this may be chance. {ENOUGH_REPEATS} repeats would show "
            "whether it is."
        ]
    others = [names[point.place] for point in here if point.series in first and point is not best]
    if others:
        equal = f"With {best.num_repeats} repeats, these are not significantly slower"
        return [f"{equal}: {_listed(others)}."]
    second = here[1]
    slower = number_text(100 * (ratio_of(second, best) - 1), digits=2)
    return [
        f"The next fastest, {names[second.place]}, takes {slower} % longer, a significant "
        "difference."
    ]


def _on_fewer_ranks(best: Point, running: Sequence[Point], floor: float) -> list[str]:
    """Say whether fewer ranks train faster than the best point's.

    Samples per second are compared, not speedups, as series may have baselines of their own.
    """
    least = 1 + (LEAST_GAIN if math.isnan(floor) else max(LEAST_GAIN, floor))
    fewer = [p for p in running if p.context == best.context and p.world_size < best.world_size]
    gains = [(_gain(point, best), point) for point in fewer]
    faster = [(gain, point) for gain, point in gains if gain.mid > least and not gain.lo <= 1]
    if not faster:
        return []
    gain, first = max(faster, key=lambda pair: pair[0].mid)
    ranks, times = number_of(first.world_size, "rank"), number_text(gain.mid)
    verb = "trains" if first.world_size == 1 else "train"
    return [f"Fewer ranks are faster: with {first.label}, {ranks} {verb} {times} times as fast."]


def _gain(point: Point, best: Point) -> Interval:
    """Compute how many times as many samples per second a point trains, in pairs of repeats."""
    samples = point.world_size / best.world_size if best.scaling == "weak" else 1.0
    return of_ratio(*paired(best.steps_s, point.steps_s)).scaled(samples)


def _best(best: Point, here: Sequence[Point], names: Mapping[Place, str]) -> KeyFigure:
    count = len(here)
    of = f"of {count} measured" if count > 1 else "alone"
    shared = [word for word in best.label.split(" ") if all(word in p.label.split() for p in here)]
    where = ", ".join([batch_text(best), *shared]) if count > 1 else batch_text(best)
    return KeyFigure("Best strategy", names[best.place], f"{of} at {where}")


def _speed(best: Point) -> KeyFigure:
    ranks, speedup = number_of(best.world_size, "rank"), best.speedup
    if math.isnan(speedup.mid) or best.world_size == 1:
        runs = number_of(best.num_repeats, "run")
        note = runs if best.world_size == 1 else f"{runs}; no one-rank run to compare with"
        return KeyFigure(f"Step on {ranks}", f"{number_text(best.step_s, 1e3)} ms", note)
    value = f"{number_text(speedup.mid)}\u2009×"
    return KeyFigure(f"Speedup on {ranks}", value, f"{_ends(best)}; ideal is {best.world_size}")


def _ends(best: Point) -> str:
    value = best.speedup
    if math.isnan(value.lo) and best.num_repeats >= ENOUGH_REPEATS:
        return f"fewer than {ENOUGH_REPEATS} repeats have a one-rank run, so no interval"
    if math.isnan(value.lo):
        once = len(best.speedups) == 1
        return f"{'one run' if once else f'fewer than {ENOUGH_REPEATS} repeats'}, so no interval"
    return f"95 % interval {number_text(value.lo)} to {number_text(value.hi)}"


def _limit(evidence: Evidence, found: Explanation) -> KeyFigure:
    name = "What limits it"
    if not found.decided:
        return KeyFigure(name, "Unknown", "exchange and compute cannot be separated yet")
    if not found.losses:
        return KeyFigure(name, "Compute", reason(evidence, found))
    first, *others = found.named
    shares = [f"{100 * loss.seconds / evidence.step_s:.0f} %" for loss in found.named]
    more = [f"{share} {loss.what}" for share, loss in zip(shares[1:], others, strict=True)]
    note = "; ".join([f"of the step {first.what}", *more])
    return KeyFigure(name, f"{LIMITS[first.part]}, {shares[0]}", note)


def batch_text(point: Point) -> str:
    """Name the batch size that stays as ranks are added."""
    batch = "batch" if point.scaling == "strong" else "per-rank batch"
    return f"{batch} {point.fixed_batch_size}"


def _listed(names: Sequence[str]) -> str:
    most = 4
    if len(names) > most:
        return f"{', '.join(names[:most])} and {number_of(len(names) - most, 'other')}"
    return in_words(names)
