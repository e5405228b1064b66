"""Instructions, loads, stores and cache hits of a model's layers, by callgrind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.benchmarks import kernels
from lab.benchmarks.request import Request
from lab.distributed import world as worlds
from lab.layers import callgrind
from lab.settings.config import ConfigError
from lab.settings.names import class_name
from lab.training.assemble import join
from lab.training.identity import surroundings

LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")  # what these libraries may use
PROGRAM = (sys.executable, "-m", "lab.benchmarks.counted")


def measure(request: Request) -> dict[str, Any]:
    """Count all variants in one process under callgrind, and time the same process without it.

    With `trace=FILE`, read what was counted on a GPU.

    Raises:
        ConfigError: valgrind is missing, or the models fail.
    """
    if request.own["trace"]:
        return kernels.measure(request.own["trace"], request)
    configs = [variant.config for variant in request.variants]
    if any(config.device == "cuda" for config in configs):
        raise ConfigError(
            "device=cuda: counters counts on CPUs, and reads with trace=FILE what a GPU counted, "
            f"recorded with {kernels.RECORDING}"
        )
    world = join(configs[0])
    try:
        around = surroundings(world, *configs)
    finally:
        worlds.stop()
    began = time.perf_counter()
    rows, own = _counted(request), request.own
    return {
        "rows": rows,
        "models": [class_name(config.model["_target_"]) for config in configs],
        "l1": own["l1"],
        "l2": own["l2"],
        "isa": own["isa"],
        "seconds": time.perf_counter() - began,
        "slowdown": sum(row["counted_s"] for row in rows) / sum(row["plain_s"] for row in rows),
        **around,
    }


def _counted(request: Request) -> list[dict[str, Any]]:
    own = request.own
    variables = os.environ | {name: own["isa"].upper() for name in LIMITS}
    variants = [json.dumps(list(variant.arguments)) for variant in request.variants]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        try:
            callgrind.command(PROGRAM, out, own["l1"], own["l2"])  # refuses before minutes pass
            program = [*PROGRAM, str(callgrind.build_marks(Path(folder))), *variants]
            plain = _printed(program, variables)
            print("counting under callgrind, which takes minutes", file=sys.stderr, flush=True)
            printed = callgrind.run(program, out, own["l1"], own["l2"], variables)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return _rows(out, json.loads(printed), json.loads(plain), request)


def _printed(program: list[str], variables: dict[str, str]) -> str:
    """Run the program without callgrind, which finds its errors in seconds.

    Raises:
        ConfigError: its last line.
    """
    done = subprocess.run(program, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise ConfigError(f"counters: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def _rows(
    out: Path, counted: list[dict[str, Any]], plain: list[dict[str, Any]], request: Request
) -> list[dict[str, Any]]:
    """Join each count with its layer, less the count of a call that does nothing."""
    counts = [
        callgrind.read(out.with_name(f"{out.name}.{number}"))
        for number in range(1, len(counted) + 2)
    ]
    _, empty, *others = counts  # the first is a warm-up
    return [
        {
            "name": request.variants[row["variant"]].label,
            "batch_size": request.variants[row["variant"]].config.batch_size,
            "layer": row["layer"],
            "kind": row["kind"],
            "pass": row["pass"],
            **asdict(found.less(empty)),
            "counted_s": row["seconds"],
            "plain_s": timed["seconds"],
        }
        for found, row, timed in zip(others, counted[1:], plain[1:], strict=True)
    ]
