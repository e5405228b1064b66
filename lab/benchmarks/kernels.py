"""Hardware counters of GPU kernels, read from a trace: `counters trace=FILE`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.benchmarks.request import Request
from lab.layers.kernels import kernels_of
from lab.layers.trace import left_out, read_events
from lab.measure.environment import environment, git_commit
from lab.settings.config import ConfigError

RECORDING = (
    "torch.profiler.profile(experimental_config=torch.profiler._ExperimentalConfig("
    'profiler_metrics=["dram__bytes_read.sum", ...], profiler_measure_per_kernel=True))'
)


def measure(path: Path, request: Request) -> dict[str, Any]:
    """Combine the metrics of the trace at `path` by kernel.

    Raises:
        ConfigError: it cannot be read, or holds no metrics, or another setting is given.
    """
    for word in request.arguments[1:]:
        if not word.startswith(("trace=", "out=")):
            raise ConfigError(f"{word}: is not used with trace=, whose counts others made")
    try:
        events = read_events(path)
    except ValueError as error:
        raise ConfigError(f"trace={error}") from None
    skipped: Counter[str] = Counter()
    found = kernels_of(events, skipped)
    if not found or not found[0].metrics:
        without = f"; left out: {left_out(skipped)}" if skipped else ""
        raise ConfigError(
            f"trace={path}: holds no metrics of kernels (events of category cuda_profiler_range)"
            f"{without}; to record them: {RECORDING}"
        )
    total, *kernels = found
    return {
        "bench": "kernels",  # whose view shows it
        "rows": [asdict(kernel) for kernel in kernels],
        "total": asdict(total),
        "trace": path.name,
        "num_events": len(events),
        "skipped": dict(skipped),
        "emulation": "none",
        "environment": environment(1, asks_tools=False),
        "git_commit": git_commit(),
    }
