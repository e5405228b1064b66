"""Seconds that a call takes: by the host's clock on CPUs, by events of the stream on GPUs.

On a GPU a call returns when it is queued. So many are timed together, between two events, while the
stream is held until the host has queued all of them: neither launches nor waiting are in the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lab.distributed.world import World
from lab.measure.hold import hold

NUM_CALLS = 20  # timed together, as nccl-tests does


@dataclass(frozen=True)
class Took:
    """Seconds of one call.

    Attributes:
        call_s: until its result is there.
        host_s: until the host has queued it, while the device is busy; None on CPUs. Where it is
            above call_s, launches are what a step waits for.
    """

    call_s: float
    host_s: float | None


def per_call(
    call: Callable[[], object],
    num_calls: int,
    device: torch.device,
    align: Callable[[], object] | None = None,
) -> Took:
    """The mean of `num_calls` that follow each other.

    Args:
        align: lets all ranks begin together: on CPUs the host waits for the others in it, on GPUs
            the stream.
    """
    if device.type == "cuda":
        return _in_stream(call, num_calls, device, align)
    if align:
        align()
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    return Took((time.perf_counter() - began) / num_calls, None)


def _in_stream(
    call: Callable[[], object],
    num_calls: int,
    device: torch.device,
    align: Callable[[], object] | None,
) -> Took:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()  # not timed: tells for how long the stream must be held
    hold(num_calls * (time.perf_counter() - began))
    if align:
        align()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    host_s = time.perf_counter() - began
    end.record()
    end.synchronize()
    return Took(begin.elapsed_time(end) / 1000 / num_calls, host_s / num_calls)


def aligner(world: World) -> Callable[[], None]:
    """Return a call that all ranks leave together: an all-reduce on GPUs, a barrier on CPUs.

    On a GPU a host's barrier would align nothing: hosts run ahead of their devices. The all-reduce
    is not counted in the traffic.
    """
    if world.device.type == "cpu":
        return world.barrier
    nothing = torch.zeros(1, device=world.device)

    def align() -> None:
        counted = replace(world.comm.traffic)
        world.comm.all_reduce(nothing)
        world.comm.traffic = counted

    return align


def cache_bytes(device: torch.device) -> int | None:
    """Size of a GPU's cache, in which smaller tensors stay from call to call; None on CPUs."""
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_properties(device).L2_cache_size
