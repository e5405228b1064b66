"""Copies between host and device in a Chrome trace: how many, how large, how hidden.

Traces of Kineto (torch.profiler, on CUDA and ROCm), of XLA and of ROCm's own profilers are
understood, which name copies differently.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.layers.trace import number

COPY, KERNEL = "gpu_memcpy", "kernel"  # Kineto's categories of events; XLA and ROCm have none
KINETO = re.compile(r"Memcpy (\w+) \((.*)\)")  # "Memcpy HtoD (Pinned -> Device)"
XLA = re.compile(r"Memcpy([HDP])2([HDP])")
XLA_DETAILS = re.compile(r"kind_src:(\S+) kind_dst:(\S+) size:(\d+)")
ROCM = re.compile(r"(?:memory_)?copy_?(host|device)_?to_?(host|device)(?:2d)?", re.IGNORECASE)
ROCM_KERNEL = re.compile(r"__amd_rocclr_(copy|fill)\w*")  # copies and fills by a kernel
SIZES = (1e3, 1e4, 1e5, 1e6, 1e7)  # edges of the histogram, bytes
MICROSECONDS = 1e-6

Floats = NDArray[np.float64]
Place = tuple[str, str]  # process and thread, which stand for device and stream


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


@dataclass(frozen=True)
class _Copy:
    device: str
    begin_us: float
    us: float
    num_bytes: float


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
    streams = _streams(events)
    copies: dict[tuple[str, str], list[_Copy]] = {}
    kernels: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        what = _what(event, streams)
        try:
            if what == "copies":
                copy = _copy(event)
                copies.setdefault(_kind(event), []).append(copy)
            elif what == "kernels":
                span = _span(event)
                kernels.setdefault(_place(event)[0], []).append(span)
        except ValueError as error:
            skipped[f"{what} {error}"] += 1
    # Times since 1970 in microseconds leave a float no digits for a copy; their differences do.
    times = [each.begin_us for of_kind in copies.values() for each in of_kind]
    origin = min(times, default=0.0)
    busy = {device: _Busy(spans, origin) for device, spans in kernels.items()}
    found = [_added(*key, of_kind, busy, origin) for key, of_kind in copies.items()]
    return sorted(found, key=lambda each: -each.num_bytes)


class _Busy:
    """The time that a device has computed until any moment, in microseconds."""

    def __init__(self, spans: Sequence[tuple[float, float]], origin: float) -> None:
        merged: list[list[float]] = []
        for begin, us in sorted(spans):
            begin -= origin
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], begin + us)
            else:
                merged.append([begin, begin + us])
        self._moments = np.array(merged).ravel()
        steps = np.zeros(len(self._moments))
        steps[1::2] = self._moments[1::2] - self._moments[::2]
        self._until = np.cumsum(steps)

    def within(self, begin: Floats, end: Floats) -> Floats:
        """Return how long it computed in each span."""
        return self._busy_until(end) - self._busy_until(begin)

    def _busy_until(self, moment: Floats) -> Floats:
        return np.asarray(np.interp(moment, self._moments, self._until))


def _added(
    direction: str, kind: str, copies: Sequence[_Copy], busy: Mapping[str, _Busy], origin: float
) -> Copies:
    hidden_us = 0.0
    for device in {each.device for each in copies} & busy.keys():
        here = [each for each in copies if each.device == device]
        begin = np.array([each.begin_us - origin for each in here])
        end = begin + np.array([each.us for each in here])
        hidden_us += float(busy[device].within(begin, end).sum())
    sizes = [each.num_bytes for each in copies]
    bins = np.bincount(np.digitize(sizes, SIZES), minlength=len(SIZES) + 1)
    seconds = MICROSECONDS * math.fsum(each.us for each in copies)
    return Copies(
        *(direction, kind, len(copies), int(math.fsum(sizes)), seconds),
        min(seconds, MICROSECONDS * hidden_us),
        tuple(bins.tolist()),
    )


def _streams(events: Iterable[Mapping[str, Any]]) -> set[Place]:
    """Return the places that XLA names as a device's streams: its events have no categories."""
    return {
        _place(event)
        for event in events
        if event.get("ph") == "M"
        and event.get("name") == "thread_name"
        and str(_args(event).get("name")).startswith("Stream #")
    }


def _what(event: Mapping[str, Any], streams: set[Place]) -> str | None:
    """Return "copies" or "kernels" for an event on a device that is one; None for any other."""
    category, name = event.get("cat"), str(event.get("name"))
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


def _copy(event: Mapping[str, Any]) -> _Copy:
    """Return a copy's numbers. ValueError: one is missing or wrong."""
    if ROCM_KERNEL.fullmatch(str(event.get("name"))) and _args(event).get("bytes") is None:
        raise ValueError("that ROCm made by a kernel, without bytes")
    details = _details(event)
    size = _number({"size": details[3]}, "size") if details else _number(_args(event), "bytes")
    return _Copy(_place(event)[0], *_span(event), size)


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    return _number(event, "ts"), _number(event, "dur")


def _number(values: Mapping[str, Any], key: str) -> float:
    if values.get(key) is None:
        raise ValueError(f"without {key}")
    if (found := number(values[key])) is None:
        raise ValueError(f"whose {key} is no number from 0 to 2^63")
    return found


def _details(event: Mapping[str, Any]) -> re.Match[str] | None:
    return XLA_DETAILS.search(str(_args(event).get("memcpy_details")))


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, Mapping) else {}


def _place(event: Mapping[str, Any]) -> Place:
    return str(event.get("pid")), str(event.get("tid"))
