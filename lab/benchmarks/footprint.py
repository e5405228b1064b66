"""Memory of a training step by kind, computed for each set of settings, and measured if asked."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from lab.benchmarks.request import Request
from lab.exchange.bucket import plan
from lab.exchange.cost import Sizes
from lab.layers.footprint import Step, footprint, largest_batch
from lab.measure.environment import environment, git_commit
from lab.problem.build import blueprint
from lab.settings.config import ConfigError, check_batch
from lab.settings.names import class_name
from lab.simulate.strategy import sync_bytes
from lab.training.optim import make_optim

PROGRAM = (sys.executable, "-m", "lab.benchmarks.resident")


def measure(request: Request) -> dict[str, Any]:
    """Compute the footprint of every variant.

    Raises:
        ConfigError: a model cannot be built, or cannot run without values.
    """
    memory_gb, measured = request.own["memory_gb"], request.own["measured"]
    num_ranks = request.own["num_ranks"]
    if measured and num_ranks > 1:
        raise ConfigError(
            f"num_ranks={num_ranks}: measured=true trains one rank; lab.bench memory measures more"
        )
    rows = [_row(each.label, each.config, memory_gb, num_ranks) for each in request.variants]
    for row, variant in zip(rows, request.variants, strict=True) if measured else ():
        row["measured_bytes"] = _resident(variant.arguments)
    return {
        "rows": rows,
        "memory_gb": memory_gb,
        "emulation": "none",
        "environment": environment(1, asks_tools=False),
        "git_commit": git_commit(),
    }


def _row(label: str, config: DictConfig, memory_gb: int | None, num_ranks: int) -> dict[str, Any]:
    check_batch(config, num_ranks)
    parts = blueprint(config)
    optim = make_optim(config.optim, config.batch_size)
    step = Step(
        *(parts.data.input_shape, parts.data.input_dtype, parts.target, parts.task.loss),
        *(optim.optimizer, config.precision),
    )
    per_rank = config.batch_size // (num_ranks if config.scaling == "strong" else 1)
    exchange = exchange_bytes(parts.model, config, num_ranks)
    try:
        found = footprint(parts.model, step, per_rank, exchange)
        most = largest_batch(parts.model, step, 1e9 * memory_gb, exchange) if memory_gb else None
    except ValueError as error:
        raise ConfigError(f"model={config.model['_target_']}: {error}") from None
    return {
        "name": label if "=" in label else f"batch_size={label}",
        "model": class_name(config.model["_target_"]),
        "batch_size": config.batch_size,
        "per_rank_batch_size": per_rank,
        "num_parameters": sum(each.numel() for each in parts.model.parameters()),
        "bytes": dict(found.kinds),
        "total_bytes": found.total_bytes,
        "modules": [asdict(each) for each in found.modules],
        "measured_bytes": None,
        "largest_batch": most,
    }


def exchange_bytes(model: nn.Module, config: DictConfig, num_ranks: int) -> int:
    """Count what exchange and sync hold on the rank that needs most (lab.simulate.strategy).

    Raises:
        ConfigError: it is not known.
    """
    if num_ranks == 1:
        return 0
    buckets = [each.parameters.values() for each in plan(model, config.bucket_mb)]
    counts = [sum(each.numel() for each in of) for of in buckets]
    gathered = sum(n for n, of in zip(counts, buckets, strict=True) if len(of) > 1)
    backend = "nccl" if config.device == "cuda" else "gloo"
    settings: Any = OmegaConf.to_container(config, resolve=True)
    found = [
        sync_bytes(
            Sizes(sum(counts), gathered, max(counts), rank, num_ranks, backend, local=num_ranks),
            settings,
        )
        for rank in (0, num_ranks - 1)  # a root, and a rank that is none
    ]
    if math.isnan(max(found)):
        raise ConfigError(f"strategy={config.strategy}: its memory is not known")
    return round(max(found))


def _resident(settings: tuple[str, ...]) -> int:
    """Measure a step's peak in a fresh process.

    Raises:
        ConfigError: it failed.
    """
    # glibc then returns freed blocks at once, so that resident memory is memory in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [*PROGRAM, *settings], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"measured=true: {' '.join(settings)}: {lines[-1]}")
    return int(done.stdout)
