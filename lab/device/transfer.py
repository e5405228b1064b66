"""Copies between host and device, read from a Kineto or Chrome trace.

Copies of Kineto (torch.profiler, on CUDA and ROCm), of XLA and of ROCm's own profilers are
understood, which name them differently, and rocprofv3's own JSON.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab.benchmarks.harness import here
from lab.benchmarks.present import Drawn, Row, decimals
from lab.benchmarks.request import BenchRequest
from lab.draw.chart import BLUE, SKY
from lab.draw.plots import bars
from lab.settings.config import ConfigError
from lab.settings.storage import events_of, number, read_trace

COPY, KERNEL = "gpu_memcpy", "kernel"  # Kineto's categories of events; XLA and ROCm have none
UNTIL_2022 = {"Memcpy": COPY, "Kernel": KERNEL}  # Kineto's earlier names of them
KINETO = re.compile(r"Memcpy (\w+) \((.*)\)")  # "Memcpy HtoD (Pinned -> Device)"
XLA = re.compile(r"Memcpy([HDP])2([HDP])")
XLA_DETAILS = re.compile(r"kind_src:(\S+) kind_dst:(\S+) size:(\d+)")
ROCM = re.compile(r"(?:memory_)?copy_?(host|device)_?to_?(host|device)(?:2d)?", re.IGNORECASE)
ROCM_KERNEL = re.compile(r"__amd_rocclr_(copy|fill)\w*")  # copies and fills by a kernel
WITHOUT_BYTES = {  # what copies of these names lack, and what has it
    ROCM_KERNEL: "that a ROCm kernel made, without bytes",
    XLA: "without bytes (a trace of a GPU by jax.profiler has them, in memcpy_details)",
    ROCM: "without bytes (rocprofv3 --sys-trace --output-format json records them)",
}
SIZES = (1e3, 1e4, 1e5, 1e6, 1e7)  # edges of the histogram, bytes
ROCPROFV3, GPU = "rocprofiler-sdk-tool", 2  # what its JSON holds, and its type of an agent
PS_PER_S = 1e12
Floats = NDArray[np.float64]
Place = tuple[str, str]  # process and thread, which stand for device and stream
Copy = tuple[str, int, int, float]  # device, begin and length in ps, bytes
Span = tuple[int, int]  # begin and length in ps
CALL = re.compile(r"(?:cuda|cu|hip)Memcpy\w*")
MB, GB, MS = 1e-6, 1e-9, 1e3
BINS = ("< 1 kB", "< 10 kB", "< 100 kB", "< 1 MB", "< 10 MB", "more")
HEADER = ["", "memories", "copies", "MB", "kB each", "GB/s", "ms", "hidden %", *BINS]


def measure(request: BenchRequest) -> dict[str, Any]:
    """Add up the copies of the trace `trace=FILE`."""
    path: Path | None = request.own["trace"]
    if path is None:
        raise ConfigError(
            "trace=null: give a trace, FILE.json or FILE.json.gz, such as one from torch.profiler"
        )
    events = read_events(path)
    skipped: Counter[str] = Counter()
    found = copies_of(events, skipped)
    if not found:
        raise ConfigError(
            f"trace={path} contains no copies between host and device{_why(events, skipped)}"
        )
    return {"rows": found, **read_from(path, events, skipped)}


def _why(events: Sequence[Mapping[str, Any]], skipped: Mapping[str, int]) -> str:
    """Return why no copy was found, to follow that none was."""
    if any(reason.startswith("copies") for reason in skipped):
        return f" that can be read; left out: {left_out(skipped)}"
    calls = Counter(name for event in events if CALL.fullmatch(name := str(event.get("name"))))
    if calls:
        name, times = calls.most_common(1)[0]
        return (
            f", but only the host's calls, such as {name} ({times}); to record what the device "
            "did, add ProfilerActivity.CUDA"
        )
    return (
        " (no events of category gpu_memcpy, as from Kineto, or named MemcpyH2D, as from XLA, or "
        "CopyHostToDevice, as from ROCm); a run on CPUs makes no such copies"
    )


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each kind of copy."""
    return [HEADER, *map(_line, result["rows"])]


def _line(row: Row) -> list[str]:
    copies, num_bytes, seconds = (row[key] for key in ("invocations", "num_bytes", "seconds"))
    return [
        *(row["direction"], row["kind"], str(copies), f"{MB * num_bytes:.3f}"),
        f"{1e-3 * num_bytes / copies:.2f}",
        decimals(num_bytes / seconds if seconds else None, GB, 3),
        f"{MS * seconds:.3f}",
        decimals(row["hidden_s"] / seconds if seconds else None, 100),
        *map(str, row["sizes"]),
    ]


def notes(result: dict[str, Any]) -> list[str]:
    events, *skipped = about_trace(result)
    return [f"{events}; hidden: while a kernel ran on the same device", *skipped]


def chart(result: dict[str, Any]) -> Drawn:
    """Draw the time of copies, hidden and exposed."""
    rows = result["rows"]
    data = pd.DataFrame(
        {"name": f"{row['direction']} {row['kind']}", "part": part, "value": MS * value}
        for row in rows
        for part, value in (
            ("exposed", row["seconds"] - row["hidden_s"]),
            ("behind kernels", row["hidden_s"]),
        )
    )
    whole_s = sum(row["seconds"] for row in rows)
    hidden = 100 * sum(row["hidden_s"] for row in rows) / whole_s if whole_s else 0.0
    message = f"Copies take {MS * whole_s:.3g} ms, {hidden:.0f} % of which is hidden by kernels"
    drawn = bars(data, "time of copies (ms)", {"exposed": BLUE, "behind kernels": SKY})
    return message, about_trace(result), drawn


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
            raise ConfigError(f"trace={path}: not a rocprofv3 trace: {error!r}") from None
    return events_of("trace", path, trace)


def _of_rocprofv3(tools: Any) -> Iterator[dict[str, Any]]:
    """Yield the copies and kernels of rocprofv3's own JSON as events like Kineto's."""
    for tool in tools if isinstance(tools, list) else [tools]:
        gpus = {each["id"]["handle"] for each in tool["agents"] if each["type"] == GPU}
        for copy in tool["buffer_records"]["memory_copy"]:
            ends = [copy[key]["handle"] for key in ("src_agent_id", "dst_agent_id")]
            source, target = ("Device" if end in gpus else "Host" for end in ends)
            name = f"Memcpy {source[0]}to{target[0]} ({source} -> {target})"
            place = next((end for end in ends if end in gpus), ends[0])
            yield _event(COPY, name, place, copy, bytes=copy.get("bytes"))
        for kernel in tool["buffer_records"]["kernel_dispatch"]:
            place = kernel["dispatch_info"]["agent_id"]["handle"]
            yield _event(KERNEL, "kernel", place, kernel)


def _event(category: str, name: str, device: int, record: Any, **args: Any) -> dict[str, Any]:
    args |= {"BeginNs": record["start_timestamp"], "EndNs": record["end_timestamp"]}
    return {"ph": "X", "cat": category, "name": name, "pid": device, "args": args}


def left_out(skipped: Mapping[str, int]) -> str:
    """Return how many events were left out, by reason: "copies without bytes: 2"."""
    return "; ".join(f"{reason}: {times}" for reason, times in skipped.items())


def read_from(path: Path, events: Sequence[Any], skipped: Mapping[str, int]) -> dict[str, Any]:
    """Return what a result says of the trace that it was read from."""
    about = {"trace": path.name, "num_events": len(events), "skipped": dict(skipped)}
    return about | here(asks_tools=False)


def about_trace(result: Mapping[str, Any]) -> list[str]:
    """Say how many events a trace has, and which were left out."""
    skipped = left_out(result.get("skipped", {}))
    events = f"{result['trace']}: {result['num_events']} events"
    return [events, *([f"left out: {skipped}"] if skipped else [])]


def copies_of(
    events: Iterable[Mapping[str, Any]], skipped: Counter[str] | None = None
) -> list[Row]:
    """Add up the copies of a trace by direction and kind, the most bytes first.

    A copy is hidden while any kernel runs on its device, on whichever stream.

    Args:
        skipped: counts the copies and kernels that are left out, by reason: a number is missing,
            negative, not finite or too large.

    Returns:
        direction: HtoD, DtoH, DtoD, … kind: the memories, as "Pinned -> Device". seconds: sum of
        their times. hidden_s: of these, while kernels ran on the same device. sizes: how many
        copies are below each edge of SIZES and above the last. And invocations, num_bytes.
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
    return sorted(found, key=lambda each: -each["num_bytes"])


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
) -> Row:
    hidden_ps = 0.0
    for device in {device for device, *_ in copies} & busy.keys():
        spans = [(begin - origin, ps) for place, begin, ps, _ in copies if place == device]
        here, until = np.array(spans, dtype=np.float64), busy[device]
        hidden_ps += float((until(here.sum(axis=1)) - until(here[:, 0])).sum())
    sizes = [num_bytes for *_, num_bytes in copies]
    bins = np.bincount(np.digitize(sizes, SIZES), minlength=len(SIZES) + 1)
    seconds = sum(ps for _, _, ps, _ in copies) / PS_PER_S
    return {
        "direction": direction,
        "kind": kind,
        "invocations": len(copies),
        "num_bytes": int(math.fsum(sizes)),
        "seconds": seconds,
        "hidden_s": min(seconds, hidden_ps / PS_PER_S),
        "sizes": bins.tolist(),
    }


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
    name, args, details = str(event.get("name")), _args(event), _details(event)
    if details:
        return _number({"size": details[3]}, "size")
    if args.get("bytes") is None:
        lack = (what for names, what in WITHOUT_BYTES.items() if names.fullmatch(name))
        raise ValueError(next(lack, "without bytes"))
    return _number(args, "bytes")


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
