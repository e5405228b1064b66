"""Compute of each rank for `lab.bench calibrate`: rates, spread, and what slows it.

Products of matrices stand for a model's layers, as large ones reach most of a device's rate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from lab.benchmarks import codec
from lab.benchmarks.harness import Call, Times, aligner, of_slowest, per_call, ratio, take_turns
from lab.benchmarks.present import IntervalJson
from lab.benchmarks.request import read
from lab.distributed.world import World
from lab.measure.environment import num_cores
from lab.measure.peaks import measured_rates
from lab.measure.statistics import STALL, least_warmup
from lab.simulate.fit import MEASURED_CODEC
from lab.simulate.hardware import CONVOLUTIONS
from lab.training.assemble import assembled

SIDES = {"cpu": 512, "cuda": 4096}  # of square matrices, for rates and their spread
SMALL_SIDES = {"cpu": 256, "cuda": 1024}  # of those beside an all-reduce, which may be short
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {"cpu": ("bf16",), "cuda": ("fp32", "tf32", "bf16", "fp16")}
ROUNDS, RESAMPLES = 8, 500
FEWEST, MOST = 50, 2000  # products whose spread is measured
CODEC_VALUES = {"cpu": 2**22, "cuda": 2**26}
BESIDE = 0.7  # of an all-reduce's time, in which the products beside it should end
PASSED = 2**20  # float32 values of each tensor of a pass over memory
SENT = (2**20, 2**21)  # float32 values of messages that are larger than what a host holds of them
QUANTILES = (5, 50, 95, 99)


def product(device: torch.device, side: int, dtype: torch.dtype = torch.float32) -> Call:
    """Return a call that multiplies two square matrices of `side`."""
    a, b = torch.rand(2, side, side, device=device).to(dtype)
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def rates(device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Measure floating-point operations per second of large products, by precision.

    Returns:
        The rates, and how many times as fast the operations are that are no products.
    """
    found, factors = dict[str, float](), dict[str, float]()
    if device.type == "cpu":
        measured = measured_rates(torch.get_num_threads())
        found["fp32"] = measured.product
        factors |= dict.fromkeys(CONVOLUTIONS, measured.convolution / measured.product)
    side = SIDES[device.type]
    for precision in PRECISIONS[device.type]:
        with _tf32(precision == "tf32"):
            call = product(device, side, DTYPES.get(precision, torch.float32))
            call()
            times = [per_call(call, 1, device).call_s for _ in range(ROUNDS)]
        found[precision] = 2 * side**3 / float(np.median(times))
    return found, factors


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def spread(world: World, seconds: float) -> dict[str, Any]:
    """Measure how much a product's time differs from call to call, while all ranks compute.

    Args:
        seconds: to take, about.

    Returns:
        `jitter`: standard deviation relative to the rank's median, without stalls; `quantiles`
        of the same relation, in percent, `ranks_s`: medians of each rank; `num_calls`,
        `num_stalls`.
    """
    call = product(world.device, SIDES[world.device.type])
    once = per_call(call, 2, world.device).call_s
    wanted = min(max(FEWEST, int(seconds / once)), MOST)
    num_calls = int(world.broadcast_text(str(wanted)))
    world.barrier()
    own_s = [per_call(call, 1, world.device).call_s for _ in range(num_calls)]
    times = world.gather(torch.tensor(own_s, dtype=torch.float64)).numpy()
    relative = times / np.median(times, axis=1, keepdims=True)
    usual = relative[relative < STALL]
    return {
        "jitter": deviation(usual),
        "quantiles": dict(
            zip(map(str, QUANTILES), np.percentile(relative, QUANTILES), strict=True)
        ),
        "ranks_s": np.median(times, axis=1).tolist(),
        "num_calls": num_calls,
        "num_stalls": int(relative.size - usual.size),
    }


def deviation(values: Times) -> IntervalJson:
    """Compute a standard deviation with its percentile bootstrap interval of 95 %."""
    values = np.asarray(values)
    picks = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[picks].std(axis=1), [2.5, 97.5])
    return {"median": float(values.std()), "low": float(low), "high": float(high)}


def contention(world: World, size: int, all_reduce_s: float) -> IntervalJson:
    """Measure how much longer compute takes beside an all-reduce, as a share.

    Args:
        size: bytes of the all-reduce. all_reduce_s: its time.
    """
    device, comm = world.device, world.comm
    call = product(device, SMALL_SIDES[device.type])
    flat = torch.zeros(size // 4, device=device)
    once = per_call(call, 4, device).call_s
    num_calls = int(world.broadcast_text(str(max(1, int(BESIDE * all_reduce_s / once)))))
    align = aligner(world)

    def alone() -> float:
        return per_call(call, num_calls, device, align).call_s

    def beside() -> float:
        handles = list[Any]()

        def begin() -> None:
            align()
            with _side_stream(device):
                handles.append(comm.iall_reduce(flat))

        taken = per_call(call, num_calls, device, begin).call_s
        handles[0].wait()
        return taken

    return excess(of_slowest(take_turns([beside, alone], ROUNDS, shows=False), world))


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Queue work on a GPU beside its current stream, as runs do; Gloo has threads for it."""
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def crowding(world: World) -> IntervalJson:
    """Measure how much longer a pass over memory takes while ranks on the same cores make one.

    It is the share that remains after ranks have taken turns, where they are more than the cores,
    for cores that are all busy; see lab.simulate.hardware.Hardware.
    """
    a, b, c = torch.ones(3, PASSED, device=world.device)
    call = partial(torch.add, a, b, out=c)
    align = aligner(world)

    def alone() -> float:
        taken = per_call(call, ROUNDS, world.device).call_s if world.rank == 0 else 0.0
        align()
        return taken

    def together() -> float:
        return per_call(call, ROUNDS, world.device, align).call_s

    times = of_slowest(take_turns([together, alone], ROUNDS, shows=False), world)
    loaded = world.size / num_cores()
    times[0] /= max(1.0, loaded)
    return {key: value and value / min(1.0, loaded) for key, value in excess(times).items()}


def of_hosts(world: World) -> dict[str, IntervalJson]:
    """Measure what messages between two hosts take of these, on CPUs."""
    return {"message_cpu": message_cpu(world), "send_buffer_bytes": send_buffer_bytes(world)}


def message_cpu(world: World) -> IntervalJson:
    """Measure for which share of a short all-reduce a rank keeps a core busy, in user or kernel."""
    flat = torch.ones(1)

    def share() -> float:
        began, busy_from = time.perf_counter(), time.process_time()
        for _ in range(FEWEST):
            world.comm.all_reduce(flat)
        return (time.process_time() - busy_from) / (time.perf_counter() - began)

    shares = sorted(min(1.0, share()) for _ in range(ROUNDS))
    return {"median": float(np.median(shares)), "low": shares[0], "high": shares[-1]}


def send_buffer_bytes(world: World) -> IntervalJson:
    """Measure how much of a message a host still holds when its send has returned.

    A send of S bytes over a link of r bytes/s returns after (S - held) / r seconds. Two sizes show
    both, on rank 0, which sends to rank 1.
    """
    messages = [torch.zeros(size) for size in SENT]
    align = aligner(world)

    def seconds(message: torch.Tensor) -> float:
        align()
        began = time.perf_counter()
        if world.rank == 0:
            world.comm.send(message, 1)
        elif world.rank == 1:
            world.comm.recv(message, 0)
        return time.perf_counter() - began

    times = take_turns([partial(seconds, each) for each in messages], ROUNDS, shows=False)
    small, large = (message.nbytes for message in messages)
    short_s, long_s = np.median(times, axis=1)
    rate = (large - small) / max(long_s - short_s, 1e-9)
    held = np.sort(np.clip(small - rate * np.array(times[0]), 0, small))
    # Of 8 rounds, the second and the last but one enclose the median of all in 93 % of cases.
    return {"median": float(np.median(held)), "low": float(held[1]), "high": float(held[-2])}


def step_cpu(config: DictConfig, world: World) -> IntervalJson:
    """Measure how long a rank keeps a core busy in a step that exchanges nothing.

    Args:
        config: of a run whose layers wait, so that only the host's work takes a core.
    """
    config = config.copy()
    config.steps = FEWEST
    with assembled(config, world) as part:
        marks = [time.process_time() for _ in part.trainer.steps()]
    taken = np.diff(marks)[least_warmup(config.warmup_steps) :]
    low, middle, high = np.percentile(taken, [10, 50, 90])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def codec_rates(device: torch.device) -> dict[str, IntervalJson]:
    """Measure the rate of a codec's and of plain passes over memory, by lab.bench codec."""
    words = ["codec", f"codec={MEASURED_CODEC}", f"num_values={CODEC_VALUES[device.type]}"]
    words += [f"threads={torch.get_num_threads()}", f"rounds={ROUNDS}", f"device={device.type}"]
    found = codec.measure(read(words))
    rows, memory = found["rows"], found["reference"]
    whole = sum(row["bytes"] for row in rows) / sum(row["time_s"]["median"] for row in rows)
    each = [1e9 * row["gb_per_s"] for row in rows]  # encode and decode
    seconds, mad = memory["time_s"]["median"], memory["time_s"]["mad"]
    return {
        "codec_bytes_per_s": {"median": whole, "low": min(each), "high": max(each)},
        "device.bandwidth_bytes_per_s": {
            "median": memory["bytes"] / seconds,
            "low": memory["bytes"] / (seconds + mad),
            "high": memory["bytes"] / (seconds - mad),
        },
    }


def excess(times: np.ndarray) -> IntervalJson:
    """Return by which share the first row of times exceeds the second, at least none."""
    found = ratio(times[0], times[1])
    return {key: None if value is None else max(0.0, value - 1) for key, value in found.items()}
