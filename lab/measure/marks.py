"""Marks: moments on the host or in a GPU's stream, and the seconds between them."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """Mark the current moment: the host's on a CPU, the current stream's on a GPU."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks, which on a GPU the stream must have reached."""
    if type(begin) is float:  # asked first: steps of a CPU have tens of marks
        return end - begin  # type: ignore[operator]
    return begin.elapsed_time(end) / 1000  # type: ignore[union-attr, arg-type]


def passed(moment: Mark) -> bool:
    """Return whether the device has reached a mark; a host mark always has been."""
    return not isinstance(moment, torch.cuda.Event) or moment.query()
