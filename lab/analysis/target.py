"""Time to accuracy: the seconds of training until a metric reaches a target, by strategy and N."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.analysis.points import Point
from lab.analysis.records import Cell
from lab.measure.intervals import UNKNOWN, Interval, of_level
from lab.task.metrics import PERCENT, main_metric, metrics_of


@dataclass(frozen=True)
class TimeToTarget:
    """How long the runs of a point took to reach a target.

    Attributes:
        seconds: of training, evaluations left out, over the runs that reached it; UNKNOWN if one
            did not, because a mean over the others would flatter.
        steps: of the run that took the most; 0 if none reached it.
    """

    point: Point
    metric: str
    seconds: Interval
    steps: int
    num_reached: int
    num_runs: int


def times_to_target(points: Sequence[Point], target: float) -> list[TimeToTarget]:
    """Find when each point's runs first reached `target`, at the resolution of `eval_every`.

    The metric is the first that is not the loss; shares, such as accuracy, must rise to the
    target, all else must fall to it.

    Args:
        target: in the metric's own unit: 0.9 is an accuracy of 90 %.
    """
    return [found for point in points if (found := _of_point(point, target))]


def _of_point(point: Point, target: float) -> TimeToTarget | None:
    runs = [cell for cell in point.done("throughput").values() if cell.evaluations]
    if not runs:
        return None
    metric = main_metric(metrics_of(runs[0].evaluations[0]))
    reached = [when for run in runs if (when := _first(run, metric, target))]
    seconds = of_level([s for s, _ in reached]) if len(reached) == len(runs) else UNKNOWN
    steps = max((step for _, step in reached), default=0)
    return TimeToTarget(point, metric, seconds, steps, len(reached), len(runs))


def _first(run: Cell, metric: str, target: float) -> tuple[float, int] | None:
    """Return seconds and step of the first evaluation that reached the target."""
    for evaluation in run.evaluations:
        value, seconds, step = (evaluation.get(key) for key in (metric, "seconds", "step"))
        if value is None or seconds is None or step is None:
            continue
        if (value >= target) if metric in PERCENT else (value <= target):
            return seconds, int(step)
    return None
