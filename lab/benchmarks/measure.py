"""Carry out a request: here, or on ranks that are started for it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from lab.benchmarks.catalogue import BENCHES
from lab.benchmarks.ranks import RanksFailed, ask_ranks, is_rank, with_world_size
from lab.benchmarks.request import Request


def measure(request: Request) -> dict[str, Any] | None:
    """Measure; return the result on rank 0, or in the process that started the ranks.

    Raises:
        ConfigError: a setting does not fit the data, devices and ranks at hand.
        RanksFailed: a rank failed, or this one ran out of memory.
    """
    try:
        return _measured(request)
    except Exception as error:
        from lab.training.failure import failure_of  # imports torch

        failure = failure_of(error, int(os.environ.get("RANK", "0")))
        if failure.status != "oom":
            raise
        raise RanksFailed(failure.error) from None


def _measured(request: Request) -> dict[str, Any] | None:
    # torch is imported only here: help and wrong settings are answered without it.
    benchmark = importlib.import_module(
        BENCHES[request.bench].module or f"lab.benchmarks.{request.bench}"
    )
    if is_rank():
        return benchmark.measure(request)
    request = with_world_size(request)
    if BENCHES[request.bench].apart:
        return benchmark.combine(list(_one_by_one(request)))
    if request.own.get("world_size", 1) == 1 and not request.cluster():
        return benchmark.measure(request)
    return ask_ranks(request)


def _one_by_one(request: Request) -> Iterator[dict[str, Any]]:
    for number, variant in enumerate(request.variants, start=1):
        print(f"[{number}/{len(request.variants)}] {variant.label}", file=sys.stderr)
        yield ask_ranks(request, variant)
