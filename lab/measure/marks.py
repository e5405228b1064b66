"""Marks: moments on the host or in a GPU's stream, and the seconds between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """Mark the current moment: the host's on a CPU, the current stream's on a GPU."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def marker(device: torch.device) -> Callable[[], Mark]:
    """Return what marks the current moment on `device`; a CPU's is no function of Python."""
    return time.perf_counter if device.type == "cpu" else partial(mark, device)


def since(begin: Mark, moments: Sequence[Mark]) -> list[float]:
    """Return the seconds from one mark to each of several; see `seconds`."""
    if type(begin) is float:
        return [moment - begin for moment in moments]  # type: ignore[operator]
    return [seconds(begin, moment) for moment in moments]


def seconds(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks, which on a GPU the stream must have reached."""
    if type(begin) is float:  # asked first: steps of a CPU have tens of marks
        return end - begin  # type: ignore[operator]
    return begin.elapsed_time(end) / 1000  # type: ignore[union-attr, arg-type]


def passed(moment: Mark) -> bool:
    """Return whether the device has reached a mark; a host mark always has been."""
    return not isinstance(moment, torch.cuda.Event) or moment.query()
