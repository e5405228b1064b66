"""Measure an item: benchmarks of lab.bench in this process, on one rank, and profiles of steps."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from lab.benchmarks.catalogue import BENCHES
from lab.benchmarks.harness import joined, wait_for
from lab.benchmarks.request import module_of, read
from lab.gpu_report.items import STRATEGIES, Item, Result
from lab.measure.environment import num_cores
from lab.measure.layers import kernels_ms
from lab.settings.config import ConfigError, load
from lab.training.assemble import assembled

COUNTED = ("none", "onebit", "int8", "powersgd")  # whose kernels are counted
METRICS = ["dram__bytes_read.sum", "dram__bytes_write.sum", "sm__inst_executed.sum"]
COPIED_BYTES, COPIES = (4_000, 400_000, 40_000_000), 5
PROFILED, UNPROFILED = 3, 4  # steps
Ends = Callable[[torch.device], None]  # called after steps, and waits for all
PRETENDED = "a GPU, on a CPU at tiny sizes: no number is from a GPU"


def measure(item: Item, pretended: bool) -> Result:
    """Measure an item.

    Raises:
        ConfigError: this version, or this machine, lacks what it measures.
    """
    return KINDS[item.kind](item.words, pretended)


def bench(words: Sequence[str], pretended: bool) -> Result:
    """Run a benchmark in this process; return what lab.bench would write to its JSON."""
    if pretended:  # beside other work, threads that wait for each other take seconds
        torch.set_num_threads(1)
        words = [*words, *(["threads=1"] if "threads" in BENCHES[words[0]].own.split() else [])]
    request = read([*words])
    found = module_of(request.bench).measure(request)
    if pretended:
        found["emulation"] = PRETENDED
    command = shlex.join(["python", "-m", "lab.bench", *words])
    return {"bench": request.bench, "command": command, **found}


def _steps(words: Sequence[str], pretended: bool) -> Result:
    """Compare strategies by steps in turns, and count the kernels of those that encode."""
    found = bench(["step", *words, f"strategy={','.join(STRATEGIES)}"], pretended)
    of_runs = [word for word in words if not word.startswith(("world_size=", "steps="))]
    kernels_s = {each: _kernels_s([*of_runs, f"strategy={each}"]) for each in COUNTED}
    return {"benches": [found], "kernels_s": kernels_s}


def _graphs(words: Sequence[str], pretended: bool) -> Result:
    """Compare each strategy with itself as one graph; those that refuse say why."""
    found, refused = list[Result](), dict[str, str]()
    for strategy in STRATEGIES:
        sets = [f"a=strategy={strategy}", f"b=strategy={strategy} graph=true"]
        try:
            found.append({"strategy": strategy, **bench(["step", *words, *sets], pretended)})
        except ConfigError as error:
            refused[strategy] = str(error)
    if not found:
        raise ConfigError(next(iter(refused.values())))
    return {"benches": found, "refused": refused}


def _cpu(words: Sequence[str], pretended: bool) -> Result:
    """Measure here, and on the CPU's cores."""
    on_cpu = [*(word for word in words if not word.startswith("device=")), "device=cpu"]
    on_cpu += [] if pretended else [f"threads={num_cores()}"]
    return {"benches": [bench(words, pretended), bench(on_cpu, pretended)]}


def _traced(
    name: str, metrics: Sequence[str], ends: Ends, words: Sequence[str], pretended: bool
) -> Result:
    """Let a benchmark read a trace of steps; see `_profiled`."""
    profiler = _profiled(words, metrics, ends)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = bench([name, f"trace={path}"], pretended)
    return {"benches": [{**found, "command": f"python -m lab.bench {name} trace={path.name}"}]}


def _kernels_s(words: Sequence[str]) -> float:
    """Return the seconds of a step's kernels without the optimizer's; on a CPU, of operations."""
    averages = _profiled(words, [], wait_for).key_averages()
    if any(each.device_type == DeviceType.CUDA for each in averages):
        return kernels_ms(averages, PROFILED) / 1e3
    return sum(each.self_cpu_time_total for each in averages) / PROFILED / 1e6


def _profiled(words: Sequence[str], metrics: Sequence[str], ends: Ends) -> profile:
    """Profile steps of a run, after others.

    Args:
        metrics: counted for each kernel, by CUPTI.
    """
    config = load([*words, f"steps={UNPROFILED + PROFILED}"])
    counted = _ExperimentalConfig(profiler_metrics=[*metrics], profiler_measure_per_kernel=True)
    with joined(config) as world, assembled(config, world) as part:
        on_gpu, steps = world.device.type == "cuda", part.trainer.steps()
        for _ in islice(steps, UNPROFILED):
            pass
        wait_for(world.device)
        kinds = [ProfilerActivity.CUDA] if on_gpu else []
        kinds += [] if metrics and on_gpu else [ProfilerActivity.CPU]
        with profile(activities=kinds, experimental_config=counted if metrics else None) as found:
            for _ in islice(steps, PROFILED):
                pass
            ends(world.device)
    return found


def _copy(device: torch.device) -> None:
    """Copy between host and device both ways, in pages and in pinned memory, by size."""
    for num_bytes in COPIED_BYTES:
        paged, there = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4, device=device)
        for here in (paged, paged.pin_memory() if device.type == "cuda" else paged):
            for _ in range(COPIES):
                there.copy_(here, non_blocking=True)
                here.copy_(there, non_blocking=True)
            wait_for(device)


KINDS: dict[str, Callable[[Sequence[str], bool], Result]] = {
    "bench": lambda words, pretended: {"benches": [bench(words, pretended)]},
    "steps": _steps,
    "graphs": _graphs,
    "cpu": _cpu,
    "copies": partial(_traced, "transfer", [], _copy),
    "counters": partial(_traced, "counters", METRICS, wait_for),
}
