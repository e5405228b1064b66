"""Hardware counters of GPU kernels in a trace, by kernel.

torch.profiler writes them with CUPTI's range profiler: an event of category cuda_profiler_range for
each launch, whose args hold the metrics (Kineto, CuptiRangeProfiler.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

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


def kernels_of(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """Combine the metrics of a trace by kernel.

    Returns:
        The sum of all kernels first, named "all"; then each, by its largest share of any metric
        that adds up. Nothing if the trace has no such events.

    Raises:
        ValueError: an event has no name or no args.
    """
    launches: dict[str, list[dict[str, float]]] = {}
    for event in events:
        if event.get("cat") == RANGE:
            try:
                launches.setdefault(_name(event), []).append(_metrics(event["args"]))
            except (KeyError, TypeError, AttributeError) as error:
                text = f"event {str(event)[:80]}: {type(error).__name__} {error}"
                raise ValueError(text) from None
    if not launches:
        return []
    total = _kernel("all", [launch for each in launches.values() for launch in each])
    kernels = [_kernel(name, each) for name, each in launches.items()]
    return [total, *sorted(kernels, key=lambda each: _rank(each, total))]


def adds_up(metric: str) -> bool:
    """Tell whether launches' values of a metric are added."""
    return metric.endswith(".sum")


def _name(event: dict[str, Any]) -> str:
    if not isinstance(name := event["name"], str):
        raise TypeError(f"name={name}: must be text")
    return name


def _metrics(args: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in args.items()
        if UNIT in name and isinstance(value, int | float) and math.isfinite(value)
    }


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
