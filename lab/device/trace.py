"""Contents of a Kineto or Chrome trace: copies between host and device, and counters of kernels.

Copies of Kineto (torch.profiler, on CUDA and ROCm), of XLA and of ROCm's own profilers are
understood, which name them differently, and rocprofv3's own JSON. Counters are written by
torch.profiler with CUPTI's range profiler: an event of category cuda_profiler_range for each
launch, whose args hold the metrics (Kineto, CuptiRangeProfiler.cpp).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.benchmarks.harness import here
from lab.settings.errors import ConfigError
from lab.settings.reading import events_of, number, read_trace

COPY, KERNEL = "gpu_memcpy", "kernel"  # Kineto's categories of events; XLA and ROCm have none
UNTIL_2022 = {"Memcpy": COPY, "Kernel": KERNEL}  # Kineto's earlier names of them
KINETO = re.compile(r"Memcpy (\w+) \((.*)\)")  # "Memcpy HtoD (Pinned -> Device)"
XLA = re.compile(r"Memcpy([HDP])2([HDP])")
XLA_DETAILS = re.compile(r"kind_src:(\S+) kind_dst:(\S+) size:(\d+)")
ROCM = re.compile(r"(?:memory_)?copy_?(host|device)_?to_?(host|device)(?:2d)?", re.IGNORECASE)
ROCM_KERNEL = re.compile(r"__amd_rocclr_(copy|fill)\w*")  # copies and fills by a kernel
SIZES = (1e3, 1e4, 1e5, 1e6, 1e7)  # edges of the histogram, bytes
ROCPROFV3, GPU = "rocprofiler-sdk-tool", 2  # what its JSON holds, and its type of an agent
PS_PER_S = 1e12
RANGE = "cuda_profiler_range"  # a category of events
UNIT = "__"  # a metric is named UNIT__COUNTER.ROLLUP, as in dram__bytes_read.sum
# Every other one, such as a rate or a share of the peak, has a plain mean: Kineto divides the
# trace's time evenly among the ranges, so there are no times to weigh by.
ROLLUPS: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "min": min, "max": max}
Floats = NDArray[np.float64]
Place = tuple[str, str]  # process and thread, which stand for device and stream
Copy = tuple[str, int, int, float]  # device, begin and length in ps, bytes
Span = tuple[int, int]  # begin and length in ps


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, as JSON or gzipped JSON.

    Raises:
        ConfigError: it cannot be read, or is no trace.
    """
    trace = read_trace("trace", path)
    if isinstance(trace, dict) and ROCPROFV3 in trace:
        try:
            return [*_of_rocprofv3(trace[ROCPROFV3])]
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"trace={path}: is not a trace of rocprofv3: {error!r}") from None
    return events_of("trace", path, trace)


def _of_rocprofv3(tools: Any) -> Iterator[dict[str, Any]]:
    """Yield the copies and kernels of rocprofv3's own JSON as events like Kineto's."""
    for tool in tools if isinstance(tools, list) else [tools]:
        gpus = {each["id"]["handle"] for each in tool["agents"] if each["type"] == GPU}
        for copy in tool["buffer_records"]["memory_copy"]:
            ends = [copy[key]["handle"] for key in ("src_agent_id", "dst_agent_id")]
            source, target = ("Device" if end in gpus else "Host" for end in ends)
            name = f"Memcpy {source[0]}to{target[0]} ({source} -> {target})"
            place = {"ph": "X", "pid": next((end for end in ends if end in gpus), ends[0])}
            times = {"BeginNs": copy["start_timestamp"], "EndNs": copy["end_timestamp"]}
            yield {
                "cat": COPY,
                "name": name,
                **place,
                "args": {"bytes": copy.get("bytes"), **times},
            }
        for kernel in tool["buffer_records"]["kernel_dispatch"]:
            place = {"ph": "X", "pid": kernel["dispatch_info"]["agent_id"]["handle"]}
            times = {"BeginNs": kernel["start_timestamp"], "EndNs": kernel["end_timestamp"]}
            yield {"cat": KERNEL, "name": "kernel", **place, "args": times}


def left_out(skipped: Mapping[str, int]) -> str:
    """Return how many events were left out, by reason: "copies without bytes: 2"."""
    return "; ".join(f"{reason}: {number}" for reason, number in skipped.items())


def read_from(path: Path, events: Sequence[Any], skipped: Mapping[str, int]) -> dict[str, Any]:
    """Return what a result says of the trace that it was read from."""
    about = {"trace": path.name, "num_events": len(events), "skipped": dict(skipped)}
    return about | here(asks_tools=False)


def about_trace(result: Mapping[str, Any]) -> list[str]:
    """Say how many events a trace has, and which were left out."""
    skipped = left_out(result.get("skipped", {}))
    events = f"{result['trace']}: {result['num_events']} events"
    return [events, *([f"left out: {skipped}"] if skipped else [])]


@dataclass(frozen=True)
class Copies:
    """All copies of one kind.

    Attributes:
        direction: HtoD, DtoH, DtoD, … kind: the memories, as "Pinned -> Device".
        seconds: sum of their times. hidden_s: of these, while kernels ran on the same device.
        sizes: how many copies are below each edge of SIZES and above the last.
    """

    direction: str
    kind: str
    invocations: int
    num_bytes: int
    seconds: float
    hidden_s: float
    sizes: tuple[int, ...]


def copies_of(
    events: Iterable[Mapping[str, Any]], skipped: Counter[str] | None = None
) -> list[Copies]:
    """Add up the copies of a trace by direction and kind, the most bytes first.

    A copy is hidden while any kernel runs on its device, on whichever stream.

    Args:
        skipped: counts the copies and kernels that are left out, by reason: a number is missing,
            negative, not finite or too large.
    """
    events, skipped = list(events), Counter() if skipped is None else skipped
    streams = {
        _place(event)
        for event in events
        if (event.get("ph"), event.get("name")) == ("M", "thread_name")
        # XLA's events have no categories, but it names a device's streams.
        and str(_args(event).get("name")).startswith("Stream #")
    }
    copies: dict[tuple[str, str], list[Copy]] = {}
    kernels: dict[str, list[Span]] = {}
    on_device = [(event, what) for event in events if (what := _what(event, streams))]
    # The ts and dur of rocprof are whole microseconds; its args have nanoseconds.
    in_ns = all("BeginNs" in _args(event) for event, _ in on_device)
    for event, what in on_device:
        device = _place(event)[0]
        try:
            if what == "copies":
                copy = device, *_span(event, in_ns), _num_bytes(event)
                copies.setdefault(_kind(event), []).append(copy)
            else:
                kernels.setdefault(device, []).append(_span(event, in_ns))
        except ValueError as error:
            skipped[f"{what} {error}"] += 1
    origin = min((begin for of_kind in copies.values() for _, begin, *_ in of_kind), default=0)
    busy = {device: _busy_until(spans, origin) for device, spans in kernels.items()}
    found = [_added(*key, of_kind, busy, origin) for key, of_kind in copies.items()]
    return sorted(found, key=lambda each: -each.num_bytes)


def _span(event: Mapping[str, Any], in_ns: bool) -> Span:
    """Return when an event on a device began, and its length. ValueError: a time is wrong."""
    if not in_ns:
        return _picoseconds(event, "ts", 1e6), _picoseconds(event, "dur", 1e6)
    begin, end = (_picoseconds(_args(event), key, 1e3) for key in ("BeginNs", "EndNs"))
    if end < begin:
        raise ValueError("that end before they begin")
    return begin, end - begin


def _picoseconds(values: Mapping[str, Any], key: str, unit: float) -> int:
    _number(values, key)
    return round(Decimal(values[key]) * int(unit))


def _busy_until(spans: Sequence[Span], origin: int) -> Callable[[Floats], Floats]:
    """Return the time that a device has computed until any moment after `origin`, in ps."""
    merged: list[list[int]] = []
    for begin, length in sorted(spans):
        begin -= origin
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], begin + length)
        else:
            merged.append([begin, begin + length])
    moments = np.array(merged, dtype=np.float64).ravel()
    steps = np.zeros(len(moments))
    steps[1::2] = moments[1::2] - moments[::2]
    until = np.cumsum(steps)
    return lambda moment: np.asarray(np.interp(moment, moments, until))


def _added(
    direction: str,
    kind: str,
    copies: Sequence[Copy],
    busy: Mapping[str, Callable[[Floats], Floats]],
    origin: int,
) -> Copies:
    hidden_ps = 0.0
    for device in {device for device, *_ in copies} & busy.keys():
        spans = [(begin - origin, ps) for place, begin, ps, _ in copies if place == device]
        here, until = np.array(spans, dtype=np.float64), busy[device]
        hidden_ps += float((until(here.sum(axis=1)) - until(here[:, 0])).sum())
    sizes = [num_bytes for *_, num_bytes in copies]
    bins = np.bincount(np.digitize(sizes, SIZES), minlength=len(SIZES) + 1)
    seconds = sum(ps for _, _, ps, _ in copies) / PS_PER_S
    return Copies(
        *(direction, kind, len(copies), int(math.fsum(sizes)), seconds),
        min(seconds, hidden_ps / PS_PER_S),
        tuple(bins.tolist()),
    )


def _what(event: Mapping[str, Any], streams: set[Place]) -> str | None:
    """Return "copies" or "kernels" for an event on a device that is one; None for any other."""
    category, name = event.get("cat"), str(event.get("name"))
    category = UNTIL_2022.get(str(category), category)
    if event.get("ph", "X") != "X":
        return None
    by_kernel = ROCM_KERNEL.fullmatch(name)
    is_copy = any(each.fullmatch(name) for each in (KINETO, XLA, ROCM))
    if category == COPY or (category == KERNEL and (is_copy or by_kernel)):
        return None if by_kernel and by_kernel[1] == "fill" else "copies"
    if category == KERNEL:
        return "kernels"
    if category is not None or (streams and _place(event) not in streams):
        return None
    if is_copy:
        return "copies"
    return "kernels" if streams and not name.startswith(("Memcpy", "Memset")) else None


def _kind(event: Mapping[str, Any]) -> tuple[str, str]:
    """Return a copy's direction and memories."""
    name, details = str(event.get("name")), _details(event)
    if found := KINETO.fullmatch(name):
        return found[1], found[2]
    if found := XLA.fullmatch(name):
        memories = f"{details[1]} -> {details[2]}".title() if details else name
        return f"{found[1]}to{found[2]}", memories
    if found := ROCM.fullmatch(name):
        source, target = found[1].capitalize(), found[2].capitalize()
        return f"{source[0]}to{target[0]}", f"{source} -> {target}"
    return "other", name


def _num_bytes(event: Mapping[str, Any]) -> float:
    """Return a copy's bytes. ValueError: they are missing or wrong."""
    if ROCM_KERNEL.fullmatch(str(event.get("name"))) and _args(event).get("bytes") is None:
        raise ValueError("that ROCm made by a kernel, without bytes")
    details = _details(event)
    if not details and _args(event).get("bytes") is None:
        raise ValueError(_without_bytes(str(event.get("name"))))
    return _number({"size": details[3]}, "size") if details else _number(_args(event), "bytes")


def _without_bytes(name: str) -> str:
    """Return what copies lack, and what has it."""
    if XLA.fullmatch(name):
        return "without bytes (XLA's args have memcpy_details: a trace of a GPU by jax.profiler)"
    if ROCM.fullmatch(name):
        return "without bytes (rocprofv3 --sys-trace --output-format json has them)"
    return "without bytes"


def _number(values: Mapping[str, Any], key: str) -> float:
    if values.get(key) is None:
        raise ValueError(f"without {key}")
    if (found := number(values[key])) is None:
        raise ValueError(f"where {key} is not a number from 0 to 2^63")
    return found


def _details(event: Mapping[str, Any]) -> re.Match[str] | None:
    return XLA_DETAILS.search(str(_args(event).get("memcpy_details")))


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, Mapping) else {}


def _place(event: Mapping[str, Any]) -> Place:
    return str(event.get("pid")), str(event.get("tid"))


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

    def rank(kernel: Kernel) -> tuple[float, int]:
        shares = (
            value / total.metrics[metric]
            for metric, value in kernel.metrics.items()
            if adds_up(metric) and total.metrics[metric]
        )
        return -max(shares, default=0.0), -kernel.num_launches

    return [total, *sorted((_kernel(name, each) for name, each in launches.items()), key=rank)]


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
