"""Marks: moments on the host or in a GPU's stream, and the seconds between them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Mark = float | torch.cuda.Event
CYCLES_PER_S = 3e9  # the fastest GPUs' clocks; a slower one holds longer
SLACK = 1.5
LONGEST_S = 0.1
OPTIMIZER = "Optimizer.step"  # torch's name for every optimizer's step


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


def hold(launch_s: float) -> None:
    """Keep the current stream busy for a little more than `launch_s`, at most LONGEST_S.

    Kernels queued meanwhile then run without gaps, so their time excludes the host's launches.
    """
    sleep = getattr(torch.cuda, "_sleep", None)  # private: a later torch may lack it
    if sleep is None:
        warnings.warn("torch.cuda._sleep is gone: times may hold launches", stacklevel=2)
        return
    sleep(int(min(SLACK * launch_s, LONGEST_S) * CYCLES_PER_S))


@contextmanager
def profiled() -> Iterator[profile]:
    """Profile the GPU's kernels; feed the result to `kernels_ms(profiler.key_averages(), ...)`."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield profiler
        torch.cuda.synchronize()


def kernels_ms(averages: Iterable[Any], num_steps: int) -> float:
    """Return the milliseconds of kernels per step, without the optimizer's.

    Args:
        averages: the profiler's events, summed by name.
        num_steps: number of profiled steps.
    """
    whole_us = optimizer_us = 0.0
    for each in averages:
        if each.device_type == DeviceType.CUDA and not each.is_user_annotation:
            whole_us += each.self_device_time_total
        elif each.device_type == DeviceType.CPU and each.key.startswith(OPTIMIZER):
            optimizer_us += each.device_time_total
    return (whole_us - optimizer_us) / num_steps / 1000
