"""Copies between host and device in a Kineto or Chrome trace: how many, how large, how hidden."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COPY, KERNEL = "gpu_memcpy", "kernel"  # categories of events
NAME = re.compile(r"Memcpy (\w+) \((.*)\)")  # "Memcpy HtoD (Pinned -> Device)"
SIZES = (1e3, 1e4, 1e5, 1e6, 1e7)  # edges of the histogram, bytes
MICROSECONDS = 1e-6

Floats = NDArray[np.float64]


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


def copies_of(events: Iterable[dict[str, Any]]) -> list[Copies]:
    """Add up the copies of a trace by direction and kind, the most bytes first.

    A copy is hidden while any kernel runs on its device, on whichever stream.

    Raises:
        ValueError: an event has no time, or a copy no size.
    """
    copies: dict[tuple[str, str], list[tuple[Any, float, float, float]]] = {}
    kernels: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        try:
            if event.get("cat") == COPY:
                copies.setdefault(_kind(event["name"]), []).append(
                    (event["pid"], *_span(event), float(event["args"]["bytes"]))
                )
            elif event.get("cat") == KERNEL:
                kernels.setdefault(event["pid"], []).append(_span(event))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"event {str(event)[:80]}: {type(error).__name__} {error}") from None
    busy = {device: _Busy(spans) for device, spans in kernels.items()}
    found = [_added(*key, of_kind, busy) for key, of_kind in copies.items()]
    return sorted(found, key=lambda each: -each.num_bytes)


class _Busy:
    """The time that a device has computed until any moment."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        merged: list[list[float]] = []
        for begin, end in sorted(spans):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
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
    direction: str,
    kind: str,
    copies: Sequence[tuple[Any, float, float, float]],
    busy: dict[Any, _Busy],
) -> Copies:
    hidden_s = 0.0
    for device in {device for device, *_ in copies} & busy.keys():
        begin, end = np.array([(b, e) for each, b, e, _ in copies if each == device]).T
        hidden_s += float(busy[device].within(begin, end).sum())
    sizes = np.array([size for *_, size in copies])
    bins = np.bincount(np.digitize(sizes, SIZES), minlength=len(SIZES) + 1)
    seconds = sum(end - begin for _, begin, end, _ in copies)
    return Copies(
        *(direction, kind, len(copies), int(sizes.sum()), seconds, hidden_s),
        tuple(bins.tolist()),
    )


def _kind(name: str) -> tuple[str, str]:
    found = NAME.fullmatch(name)
    return (found[1], found[2]) if found else ("other", name)


def _span(event: dict[str, Any]) -> tuple[float, float]:
    begin = MICROSECONDS * float(event["ts"])
    return begin, begin + MICROSECONDS * float(event["dur"])
