"""Join the ranks of a benchmark, and time calls.

On CPUs the host's clock times a call. On a GPU, a call returns when it is queued. So several calls
are timed together between two events, and the stream is held until the host has queued all of them:
the time includes neither launches nor waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch

from lab.benchmarks.interleave import turns
from lab.benchmarks.request import Request
from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.measure.environment import environment, git_commit
from lab.measure.layers import hold
from lab.training.assemble import join
from lab.training.recording import surroundings

NUM_CALLS = 20  # timed together, as in nccl-tests


def on_ranks(
    measure: Callable[[Request, World], dict[str, Any]],
) -> Callable[[Request], dict[str, Any] | None]:
    """Let all ranks join before they measure, and leave afterwards.

    Args:
        measure: gets the world of the first variant, on each rank.

    Returns:
        A function that on rank 0 returns what was measured, with ranks, machine and emulation, and
        None on others. It raises ConfigError if a setting does not fit the machine.
    """

    @wraps(measure)
    def joined(request: Request) -> dict[str, Any] | None:
        configs = [variant.config for variant in request.variants]
        try:
            world = join(configs[0])
            found = measure(request, world)
            ranks = {"world_size": world.size, "backend": world.comm.backend}
            found |= {**ranks, **surroundings(world, *configs)}
            return found if world.rank == 0 else None
        finally:
            worlds.stop()

    return joined


def worlds_of(request: Request, first: World) -> list[World]:
    """Return the world of each variant, `first` and others, perhaps over other comms."""
    return [first, *(join(variant.config) for variant in request.variants[1:])]


def here(emulation: str = "none") -> dict[str, Any]:
    """Describe machine and software of this process, for the result of a benchmark without ranks.

    Args:
        emulation: what of it is emulated, in a clause.
    """
    return {"emulation": emulation, "environment": environment(1), "git_commit": git_commit()}


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


def slowest(
    calls: Sequence[Callable[[], object]], num_calls: int, num_rounds: int, world: World
) -> tuple[np.ndarray, np.ndarray]:
    """Time calls in turns, which all ranks make together.

    Args:
        num_calls: of one candidate, timed together in one turn.

    Returns:
        Seconds of a call on the rank where it took longest, and of that host to queue it (NaN on
        CPUs): each [calls, rounds].
    """
    align = aligner(world)
    own_s = np.full((2, len(calls), num_rounds), np.nan)
    for index, number in turns(len(calls), range(num_rounds)):
        took = per_call(calls[index], num_calls, world.device, align)
        own_s[:, index, number] = took.call_s, took.host_s or np.nan
    calls_s, hosts_s = world.gather(torch.from_numpy(own_s)).amax(dim=0).numpy()
    return calls_s, hosts_s


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
