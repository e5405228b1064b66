"""Memory of a training step by kind, computed for each set of settings, and measured if asked."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from omegaconf import DictConfig

from lab.benchmarks.request import Request
from lab.layers.footprint import Step, largest_batch, peak_bytes
from lab.measure.environment import environment, git_commit
from lab.problem.build import blueprint
from lab.settings.config import ConfigError
from lab.training.optim import make_optim

PROGRAM = (sys.executable, "-m", "lab.benchmarks.resident")


def measure(request: Request) -> dict[str, Any]:
    """Compute the footprint of every variant.

    Raises:
        ConfigError: a model cannot be built, or cannot run without values.
    """
    memory_gb, measured = request.own["memory_gb"], request.own["measured"]
    rows = [_row(each.label, each.config, memory_gb) for each in request.variants]
    for row, variant in zip(rows, request.variants, strict=True) if measured else ():
        row["measured_bytes"] = _resident(variant.arguments)
    return {
        "rows": rows,
        "memory_gb": memory_gb,
        "emulation": "none",
        "environment": environment(1, asks_tools=False),
        "git_commit": git_commit(),
    }


def _row(label: str, config: DictConfig, memory_gb: int | None) -> dict[str, Any]:
    plan = blueprint(config)
    optim = make_optim(config.optim, config.batch_size)
    step = Step(
        *(plan.data.input_shape, plan.data.input_dtype, plan.target, plan.task.loss),
        *(optim.optimizer, config.precision),
    )
    model = config.model["_target_"].rpartition(".")[2]
    try:
        kinds = peak_bytes(plan.model, step, config.batch_size)
        most = largest_batch(plan.model, step, 1e9 * memory_gb) if memory_gb else None
    except ValueError as error:
        raise ConfigError(f"model={config.model['_target_']}: {error}") from None
    return {
        "name": label if "=" in label else f"batch_size={label}",
        "model": model,
        "batch_size": config.batch_size,
        "num_parameters": sum(each.numel() for each in plan.model.parameters()),
        "bytes": dict(kinds),
        "total_bytes": sum(kinds.values()),
        "measured_bytes": None,
        "largest_batch": most,
    }


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
