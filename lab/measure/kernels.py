"""Times of a GPU's kernels by torch.profiler, to cross-check the layer clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

OPTIMIZER = "Optimizer.step"  # torch's name for every optimizer's step


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
