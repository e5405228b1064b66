"""Carry out a request: here, or on ranks that are started for it. Nothing here imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.benchmarks.catalogue import BENCHES, NUM_RANKS, module_of
from lab.benchmarks.request import Request, Variant
from lab.distributed.launcher import was_launched
from lab.record.files import write_json
from lab.settings.config import ConfigError

ANSWER = "LAB_BENCH_ANSWER"  # variable with the path of rank 0's result file
REFUSED = "refused"


class RanksFailed(RuntimeError):
    """Raised if the ranks ended without a result; their output says why."""


def measure(request: Request) -> dict[str, Any] | None:
    """Measure; return the result on rank 0, or in the process that started the ranks.

    Raises:
        ConfigError: a setting does not fit the data, devices and ranks at hand.
        RanksFailed: a rank failed, or this one ran out of memory.
    """
    request = request if is_rank() else with_world_size(request)
    reason = BENCHES[request.bench].one_rank
    if reason and request.own["world_size"] == 1:
        raise ConfigError(f"world_size=1: {reason}")
    try:
        if not is_rank() and BENCHES[request.bench].apart:
            return module_of(request.bench).combine(list(_one_by_one(request)))
        alone = request.own.get("world_size", 1) == 1 and not request.cluster()
        starts = 1 if is_rank() else request.own.get("starts") or 1
        if starts > 1:
            return module_of(request.bench).combine(list(_again(request, starts)))
        if is_rank() or alone:
            return module_of(request.bench).measure(request)
        return ask_ranks(request)
    except Exception as error:
        from lab.training.run import failure_of  # imports torch

        failure = failure_of(error, int(os.environ.get("RANK", "0")))
        if failure.status != "oom":
            raise
        raise RanksFailed(failure.error) from None


def _one_by_one(request: Request) -> Iterator[dict[str, Any]]:
    for number, variant in enumerate(request.variants, start=1):
        print(f"[{number}/{len(request.variants)}] {variant.label}", file=sys.stderr)
        yield ask_ranks(request, variant)


def _again(request: Request, starts: int) -> Iterator[dict[str, Any]]:
    """Start ranks several times, each time with another order of the candidates."""
    for number in range(starts):
        print(f"start {number + 1} of {starts}", file=sys.stderr)
        yield ask_ranks(request, order_seed=request.own["order_seed"] + number)


def was_asked() -> bool:
    """Tell whether another lab.bench has started this process as a rank."""
    return ANSWER in os.environ


def is_rank() -> bool:
    """Tell whether this process is a rank, started by lab.bench or by the user's launcher."""
    return was_asked() or was_launched()


def with_world_size(request: Request) -> Request:
    """Set the number of ranks: as requested, or NUM_RANKS, but no more than GPUs.

    Raises:
        ConfigError: GPUs are requested, and there is none.
    """
    if request.own.get("world_size", 0) is not None:
        return request
    import torch

    from lab.distributed.world import check_gpus

    config = request.variants[0].config
    try:
        alone = check_gpus(config.device, 1) and not config.share_gpus
    except ValueError as error:
        raise ConfigError(str(error)) from None
    most = torch.cuda.device_count() if alone else NUM_RANKS
    return replace(request, own={**request.own, "world_size": min(NUM_RANKS, most)})


def ask_ranks(
    request: Request, alone: Variant | None = None, order_seed: int | None = None
) -> dict[str, Any]:
    """Start fresh ranks under their own torchrun or horovodrun, and return their result.

    Each rank computes on one thread unless OMP_NUM_THREADS says otherwise, as in a sweep.

    Args:
        alone: the only variant that these ranks measure; None: all.
        order_seed: of the one start that these ranks make, where there are several.

    Raises:
        ConfigError: the ranks refused a setting.
        RanksFailed: a rank failed.
    """
    from lab.study.launch import end_with_parent, starter, stop  # imports torch

    arguments = [request.bench, *alone.arguments] if alone else request.arguments
    if order_seed is not None:
        arguments = [*arguments, "starts=1", f"order_seed={order_seed}"]
    defaults = {"OMP_NUM_THREADS": "1", **dict(BENCHES[request.bench].environment)}
    cluster = request.cluster(alone)
    launcher = starter(request.own.get("world_size", 1), request.over_horovod, cluster)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        process = subprocess.Popen(
            [*launcher, "-m", "lab.bench", *arguments],
            stdin=subprocess.DEVNULL,
            env={**defaults, **os.environ, ANSWER: str(answer)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            process.wait()
        except KeyboardInterrupt:
            stop(process)
            raise
        if process.returncode or not answer.exists():
            raise RanksFailed(f"the ranks ended with exit code {process.returncode}, see above")
        result: dict[str, Any] = json.loads(answer.read_text())
    if REFUSED in result:
        raise ConfigError(result[REFUSED])
    return result


def hand_over(result: dict[str, Any]) -> int:
    """Pass a result, or a refusal, to the process that started the ranks; return the exit code."""
    write_json(Path(os.environ[ANSWER]), result)
    return 0
