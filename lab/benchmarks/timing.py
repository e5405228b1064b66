"""Time calls: by the host's clock on CPUs, by events of the stream on GPUs.

On a GPU, a call returns when it is queued. So several calls are timed together between two events,
and the stream is held until the host has queued all of them: the time includes neither launches nor
waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lab.distributed.world import World
from lab.measure.layers import hold

NUM_CALLS = 20  # timed together, as in nccl-tests


@dataclass(frozen=True)
class Took:
    """Seconds of one call.

    Attributes:
        call_s: until the result is there.
        host_s: until the host has queued the call, while the device is busy; None on CPUs. Above
            call_s, launches limit the step.
    """

    call_s: float
    host_s: float | None


def per_call(
    call: Callable[[], object],
    num_calls: int,
    device: torch.device,
    align: Callable[[], object] | None = None,
) -> Took:
    """Return the mean time of `num_calls` consecutive calls.

    Args:
        align: lets all ranks begin together; on CPUs the host waits in it for the other ranks, on
            GPUs the stream.
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
    call()  # not timed: measures for how long the stream must be held
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

    On GPUs, a barrier of the hosts would not align the devices, which lag behind. The all-reduce is
    not counted as traffic.
    """
    if world.device.type == "cpu":
        return world.barrier
    nothing = torch.zeros(1, device=world.device)

    def align() -> None:
        with world.comm.traffic.uncounted():
            world.comm.all_reduce(nothing)

    return align


def cache_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU's cache, where smaller tensors stay between calls; None on CPUs."""
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_properties(device).L2_cache_size
