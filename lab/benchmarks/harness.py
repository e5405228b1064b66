"""The parts of measuring that benchmarks share: ranks, turns, times of calls, statistics.

On CPUs the host's clock times a call. On a GPU, a call returns when it is queued. So several calls
are timed together between two events, and the stream is held until the host has queued all of them:
the time includes neither launches nor waiting.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from operator import sub, truediv
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from lab.benchmarks.present import IntervalJson
from lab.benchmarks.request import BenchRequest
from lab.certificate.traffic import namespace, sent_bytes
from lab.cluster.network import INTERFACE
from lab.cluster.settings import EMULATION
from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.measure.environment import environment, git_commit
from lab.measure.layers import spin_stream
from lab.measure.statistics import Interval, of_level, order, student
from lab.settings.errors import as_config_error
from lab.settings.streams import progress
from lab.training.assemble import join
from lab.training.recording import benchmark_environment

T = TypeVar("T")
Times = Sequence[float] | NDArray[np.float64]
Call = Callable[[], object]

NUM_CALLS = 20  # timed together, as in nccl-tests
RESAMPLES, SEED = 10_000, 0
# The interval of a median never leaves [smallest, largest] of n values, and these two enclose
# the true median with probability 1 - 2^(1-n): below six values that is less than 95 %.
ENOUGH_ROUNDS = 6
NUM_EMULATED_CALLS, COUNTED_CALLS = 3, 4
KERNELS_EACH = 8  # torch's own limit of a model: training, inference, and what else it compiles


@contextmanager
def joined(config: DictConfig, threads: int | None = None) -> Iterator[World]:
    """Join the world of a run, on CPUs with so many threads; None: as many as torch takes.

    Raises:
        ConfigError: a setting does not fit the devices and ranks at hand.
    """
    try:
        world = join(config)
        if threads:
            torch.set_num_threads(threads)
        yield world
    finally:
        worlds.stop()


def on_ranks(
    measure: Callable[[BenchRequest, World], dict[str, Any]], names_ranks: bool = True
) -> Callable[[BenchRequest], dict[str, Any] | None]:
    """Let all ranks join the world of the first variant before they measure, and leave afterwards.

    Args:
        names_ranks: the result has the number of ranks and their backend.

    Returns:
        A function that on rank 0 returns what was measured, with machine and emulation, and None on
        others.
    """

    @wraps(measure)
    def measure_jointly(request: BenchRequest) -> dict[str, Any] | None:
        configs = [variant.config for variant in request.variants]
        threads = request.own.get("threads")
        with joined(configs[0], threads) as world, _compiling_each(configs):
            found = measure(request, world)
            if names_ranks:
                found |= {"world_size": world.size, "backend": world.comm.backend}
            found |= benchmark_environment(world, *configs)
            return found if world.rank == 0 else None

    return measure_jointly


on_one_rank = partial(on_ranks, names_ranks=False)


@contextmanager
def _compiling_each(configs: Sequence[DictConfig]) -> Iterator[None]:
    """Let torch.compile make kernels for each batch, as in a run of its own.

    It would take other batches of a model for changes of shape, make the second one's kernels for
    any, and after eight of them compile no more.
    """
    if not any(config.compile for config in configs):
        yield
        return
    import torch._dynamo

    limit = KERNELS_EACH * len(configs)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=limit):
        yield


def worlds_of(request: BenchRequest, first: World) -> list[World]:
    """Return the world of each variant, `first` and others, perhaps over other comms."""
    return [first, *(join(variant.config) for variant in request.variants[1:])]


def here(emulation: str = "none", asks_tools: bool = True) -> dict[str, Any]:
    """Describe machine and software of this process, for the result of a benchmark without ranks.

    Args:
        emulation: what of it is emulated, in a clause.
        asks_tools: see lab.measure.environment; False where nothing is timed.
    """
    about = environment(1, asks_tools)
    return {"emulation": emulation, "environment": about, "git_commit": git_commit()}


def take_turns(
    takes: Sequence[Callable[[], T]],
    num_rounds: int,
    shows: bool = True,
    wants: Callable[[list[T]], bool] = lambda _: True,
) -> list[list[T]]:
    """Call candidates in turns, in an order drawn anew for each round, the same on all ranks.

    Args:
        shows: draw a bar of progress.
        wants: by what a candidate has returned so far, whether it takes part in the next round.

    Returns:
        What the calls of each candidate returned, by round.
    """
    taken: list[list[T]] = [[] for _ in takes]
    for number in progress(range(num_rounds), "round", shows):
        for index in order(len(takes), number):
            if wants(taken[index]):
                taken[index].append(takes[index]())
    return taken


def within(budget_s: float, fewest: int) -> Callable[[list[float]], bool]:
    """Let a slow candidate take part in fewer rounds, for `take_turns`, but in `fewest` or more."""
    return lambda seconds: len(seconds) < fewest or sum(seconds) < budget_s


@dataclass(frozen=True)
class CallTiming:
    """Seconds of one call.

    Attributes:
        call_s: until the result is there.
        host_s: until the host has queued the call, while the device is busy; None on CPUs. Above
            call_s, launches limit the step.
    """

    call_s: float
    host_s: float | None


def slowest(
    calls: Sequence[Call], num_calls: int, num_rounds: int, world: World
) -> tuple[np.ndarray, np.ndarray]:
    """Time calls in turns, which all ranks make together.

    Args:
        num_calls: of one candidate, timed together in one turn.

    Returns:
        Seconds of a call on the rank where it took longest, and of that host to queue it (NaN on
        CPUs): each [calls, rounds].
    """
    align = aligner(world)
    takes = [partial(per_call, call, num_calls, world.device, align) for call in calls]
    taken = take_turns(takes, num_rounds, shows=False)
    own_s = [[(one.call_s, one.host_s or np.nan) for one in each] for each in taken]
    calls_s, hosts_s = np.moveaxis(of_slowest(own_s, world), -1, 0)
    return calls_s, hosts_s


def of_slowest(seconds: Any, world: World) -> NDArray[np.float64]:
    """Return seconds, of any shape, on the rank where each is longest; all ranks call it."""
    return world.gather(torch.tensor(seconds, dtype=torch.float64)).amax(dim=0).numpy()


def per_call(
    call: Call, num_calls: int, device: torch.device, align: Call | None = None
) -> CallTiming:
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
    return CallTiming((time.perf_counter() - began) / num_calls, None)


def _in_stream(call: Call, num_calls: int, device: torch.device, align: Call | None) -> CallTiming:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()  # not timed: measures for how long the stream must be held
    spin_stream(num_calls * (time.perf_counter() - began))
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
    return CallTiming(begin.elapsed_time(end) / 1000 / num_calls, host_s / num_calls)


def seconds_of(call: Call, device: torch.device) -> float:
    """Return the seconds until a call's result is there, from when the device has nothing to do."""
    wait_for(device)
    began = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - began


def device_for(wanted: str) -> torch.device:
    """Return the device of one rank. ConfigError: GPUs are wanted, and there is none."""
    with as_config_error():
        return torch.device("cuda" if worlds.check_gpus(wanted, 1) else "cpu")


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


@dataclass(frozen=True)
class Sent:
    """Bytes that one call sends.

    Attributes:
        busiest: payload of the rank that sends most.
        across: payload that the ranks of a host send to other hosts, of the host that sends most.
        link: all bytes that a host's interface has sent, of the host that sent most; None: the
            ranks are not on emulated hosts.
    """

    busiest: int
    across: int
    link: int | None


def sent_by(call: Call, world: World) -> Sent:
    """Count the bytes of one `call`, which all ranks make together.

    On emulated hosts it is the median of several by the interface's bytes: on a busy machine TCP
    sends a segment twice, now and then.
    """
    num_calls = NUM_EMULATED_CALLS if EMULATION in os.environ else 1
    counted = [_sent_by(call, world) for _ in range(num_calls)]
    return sorted(counted, key=lambda sent: sent.link or 0)[num_calls // 2]


def _sent_by(call: Call, world: World) -> Sent:
    world.barrier()
    before, traffic = _link_bytes(), world.comm.traffic
    sent = traffic.so_far()
    call()
    world.barrier()  # until all have received, so that all have sent
    payload, _, across = (now - then for now, then in zip(traffic.so_far(), sent, strict=True))
    own = torch.tensor([payload, across, _link_bytes() - before])
    payloads, acrosses, links = world.gather(own).T.tolist()
    of_hosts = [sum(acrosses[rank] for rank in node) for node in world.comm.nodes]
    return Sent(max(payloads), max(of_hosts), max(links) or None)


def _link_bytes() -> int:
    """Return what this emulated host has sent so far; 0 if it is a real one."""
    return (EMULATION in os.environ and sent_bytes(INTERFACE)) or 0


def through_interfaces(call: Call, world: World) -> float | None:
    """Return the bytes of one call that crossed the interfaces of all ranks; None if uncounted.

    Ranks of one host share its interfaces, which count once. Barriers and headers are included, so
    small tensors seem to need more.
    """
    if world.device.type == "cuda":  # whose links have no such counter
        return None
    call()
    world.barrier()
    before = sent_bytes()
    world.barrier()
    for _ in range(COUNTED_CALLS):
        call()
    world.barrier()
    after = sent_bytes()
    world.barrier()
    if before is None or after is None:
        return None
    counted = world.gather(torch.tensor([namespace(), after - before])).tolist()
    return sum(dict(counted).values()) / COUNTED_CALLS


def middle(times: Times) -> dict[str, float]:
    """Compute the median and the median absolute deviation (unscaled)."""
    median = float(np.median(times))
    return {"median": median, "mad": float(np.median(np.abs(np.asarray(times) - median)))}


def interval(
    statistic: Callable[..., Any], *samples: Times, average: Callable[..., Any] = np.median
) -> IntervalJson:
    """Compute a statistic of the samples' medians, with a percentile bootstrap interval.

    (B. Efron and R. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.) Whole rounds
    are resampled, so drift that a round's trials share cancels.

    Args:
        statistic: takes one array of medians per sample, shape (resamples,), element by element.
        samples: equally long; values at the same position are of the same round.
        average: numpy's median, or its mean for what a wall clock shows.

    Returns:
        median (the statistic itself), low and high of 95 %; None where a value is not finite, low
        and high also for fewer than ENOUGH_ROUNDS.
    """
    values = np.array(samples, dtype=np.float64)
    num_rounds = values.shape[1]
    low = high = math.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        median = float(statistic(*average(values, axis=1)))
        if num_rounds >= ENOUGH_ROUNDS:
            picks = np.random.default_rng(SEED).integers(num_rounds, size=(RESAMPLES, num_rounds))
            resampled = statistic(*average(values[:, picks], axis=2))
            low, high = map(float, np.percentile(resampled, [2.5, 97.5]))
    return _in_json(Interval(low, median, high))


def _in_json(found: Interval) -> IntervalJson:
    named = {"median": found.mid, "low": found.lo, "high": found.hi}
    return {name: value if math.isfinite(value) else None for name, value in named.items()}


# Of one sample; of times / reference, times - reference, and sum(times) / sum(reference).
level = partial(interval, lambda seconds: seconds)
ratio, difference = partial(interval, truediv), partial(interval, sub)
mean_ratio = partial(interval, truediv, average=np.mean)


def across_starts(of_starts: Sequence[IntervalJson | None], positive: bool) -> IntervalJson | None:
    """Average a quantity over starts, each of fresh ranks, with Student's t interval of 95 %.

    All steps of a start share what it has drawn, such as the layout of memory and the cores, so
    resampling them leaves that out. The starts are the independent values (A. Georges, D. Buytaert
    and L. Eeckhout, Statistically Rigorous Java Performance Evaluation, OOPSLA 2007, section 3.2).

    Args:
        of_starts: the quantity in each start, of which the interval within it is not used.
        positive: a ratio: the average is the geometric mean, and the interval that of logarithms.

    Returns:
        median (the average), low and high, which are None for fewer than three starts; None if a
        start lacks the quantity.
    """
    values = [each["median"] for each in of_starts if each and each["median"] is not None]
    if len(values) < len(of_starts):
        return None
    return _in_json(of_level(values) if positive else student(np.array(values)))


def joined_starts(starts: Sequence[dict[str, Any]], positive: Mapping[str, bool]) -> dict[str, Any]:
    """Combine results of several starts, row by row.

    Args:
        positive: for each quantity of a row that is averaged, whether it is; see `across_starts`.

    Returns:
        A result of the first one's form, and `starts`: each one's rows and order_seed.
    """
    rows = [
        of_row[0] | {k: across_starts([each[k] for each in of_row], positive[k]) for k in positive}
        for of_row in zip(*(start["rows"] for start in starts), strict=True)
    ]
    kept = [{key: start[key] for key in ("order_seed", "rows")} for start in starts]
    return {**starts[0], "rows": rows, "starts": kept}


def places(num_candidates: int, seed: int) -> list[int]:
    """Draw the order in which candidates are built, warmed up and numbered in one start.

    Consecutive seeds rotate one shuffled order, so that as many starts as there are candidates give
    each of them every place once: what a place costs favours none.
    """
    block, rotation = divmod(seed, num_candidates)
    shuffled = order(num_candidates, block)
    return [*shuffled[rotation:], *shuffled[:rotation]]
