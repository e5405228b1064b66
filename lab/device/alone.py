"""Shared by benchmarks of one device: how they run, and how their sample is worded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig

from lab.benchmarks.present import machine
from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.measure.environment import environment, git_commit
from lab.measure.onednn import implementations
from lab.training.assemble import join


@contextmanager
def on_one_rank(config: DictConfig, threads: int | None = None) -> Iterator[World]:
    """Join a world of one rank on the device of a run, on CPUs with so many threads; None: its own.

    Raises:
        ConfigError: the device is not there.
    """
    try:
        world = join(config)
        if threads:
            torch.set_num_threads(threads)
        yield world
    finally:
        worlds.stop()


@contextmanager
def compiling_each(configs: Sequence[DictConfig], num_ways: int) -> Iterator[None]:
    """Let torch.compile make kernels for each batch, as in a run of its own.

    It would take other batches of a model for changes of shape, make the second one's kernels for
    any, and after eight of them compile no more.

    Args:
        num_ways: forms of each model: training alone, or inference too.
    """
    if not any(config.compile for config in configs):
        yield
        return
    import torch._dynamo

    limit = 2 * num_ways * len(configs)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=limit):
        yield


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until a call's result is there, from when the device has nothing to do."""
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def not_run() -> dict[str, Any]:
    """Return what a result says of this machine, where nothing runs that is timed."""
    here = environment(1, asks_tools=False)
    return {"emulation": "none", "environment": here, "git_commit": git_commit()}


def implementation(call: Callable[[], object]) -> str | None:
    """Return which of its implementations oneDNN ran last; None: it does not say."""
    ran = implementations(call)
    return ran[-1] if ran else None


def medians_of(result: dict[str, Any]) -> str:
    """Write the machine, its threads and the rounds of a result in a line."""
    return f"{threaded(result)} · medians of {result['num_rounds']} rounds in turns"


def threaded(result: dict[str, Any]) -> str:
    """Write the machine and its threads in a line."""
    threads = result["environment"]["num_threads"]
    return f"{machine(result)}, {threads} thread{'s' if threads > 1 else ''}"


def span(values: Sequence[float], digits: str = ".3g") -> str:
    """Write the least and the largest value: "3 to 5", or "3" if they are alike."""
    return " to ".join(dict.fromkeys(f"{end:{digits}}" for end in (min(values), max(values))))
