"""Hardware counters of GPU kernels in a trace, by kernel.

torch.profiler writes them with CUPTI's range profiler: an event of category cuda_profiler_range for
each launch, whose args hold the metrics (Kineto, CuptiRangeProfiler.cpp).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lab.layers.trace import number

RANGE = "cuda_profiler_range"  # a category of events
UNIT = "__"  # a metric is named UNIT__COUNTER.ROLLUP, as in dram__bytes_read.sum
# Every other one, such as a rate or a share of the peak, has a plain mean: Kineto divides the
# trace's time evenly among the ranges, so there are no times to weigh by.
ROLLUPS: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "min": min, "max": max}


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel, on all GPUs.

    Attributes:
        name: demangled, with its template's arguments; a user's range has the range's name.
        metrics: of all launches, by name; without those that no launch has.
    """

    name: str
    num_launches: int
    metrics: dict[str, float]


def kernels_of(
    events: Iterable[dict[str, Any]], skipped: Counter[str] | None = None
) -> list[Kernel]:
    """Combine the metrics of a trace by kernel.

    Args:
        skipped: counts what is left out, by reason: launches without a name or args, and metrics
            that are not finite or negative.

    Returns:
        The sum of all kernels first, named "all"; then each, by its largest share of any metric
        that adds up. Nothing if the trace has no such events.
    """
    launches: dict[str, list[dict[str, float]]] = {}
    skipped = Counter() if skipped is None else skipped
    for event in events:
        if event.get("cat") == RANGE:
            name, args = event.get("name"), event.get("args")
            if isinstance(name, str) and isinstance(args, dict):
                launches.setdefault(name, []).append(_metrics(args, skipped))
            else:
                skipped["kernels without a name or args"] += 1
    if not launches:
        return []
    total = _kernel("all", [launch for each in launches.values() for launch in each])
    kernels = [_kernel(name, each) for name, each in launches.items()]
    return [total, *sorted(kernels, key=lambda each: _rank(each, total))]


def adds_up(metric: str) -> bool:
    """Tell whether launches' values of a metric are added."""
    return metric.endswith(".sum")


def _metrics(args: dict[str, Any], skipped: Counter[str]) -> dict[str, float]:
    numbers = {name: number(value) for name, value in args.items() if UNIT in name}
    found = {name: value for name, value in numbers.items() if value is not None}
    if len(found) < len(numbers):
        skipped["metrics that are no numbers from 0 to 2^63"] += len(numbers) - len(found)
    return found


def _kernel(name: str, launches: Sequence[dict[str, float]]) -> Kernel:
    values: dict[str, list[float]] = {}
    for launch in launches:
        for metric, value in launch.items():
            values.setdefault(metric, []).append(value)
    combined = {
        metric: ROLLUPS.get(metric.rpartition(".")[2], fmean)(each)
        for metric, each in values.items()
    }
    return Kernel(name, len(launches), combined)


def _rank(kernel: Kernel, total: Kernel) -> tuple[float, int]:
    shares = [
        value / total.metrics[metric]
        for metric, value in kernel.metrics.items()
        if adds_up(metric) and total.metrics[metric]
    ]
    return -max(shares, default=0.0), -kernel.num_launches
