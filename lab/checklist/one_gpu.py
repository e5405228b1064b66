"""Items for one GPU. Ranges are estimates; none was measured beforehand."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lab.checklist.figures import (
    Read,
    is_recorded,
    layers_ms,
    less,
    per_step,
    printed,
    ratio,
    recorded,
    row,
    says,
    seen,
    total,
    value,
)
from lab.checklist.item import STUDY, Command, Figure, Item, Machine, Results

ALEXNET = (
    *("model=alexnet", "data=synthetic", "data.shape=[3,224,224]", "data.num_classes=1000"),
    *("data.num_images=4096", "optim.lr=0.001", "warmup_steps=10"),
)
ENCODE = {  # by number of columns, the least share of a copy's rate
    64: (0.4, "several short rows a program"),
    363: (0.3, "rows that end in the middle of 128 bits"),
    4096: (0.45, "whole tiles and aligned loads"),
    9216: (0.45, "as 4096"),
    25088: (0.4, "the longest row of VGG, kept on chip"),
}
STEPS = {  # strategies besides none: name of the run, and its settings
    "step_256": ("a", "batch 256", ("batch_size=256",)),
    "step_256_bf16": ("b", "batch 256, bf16", ("batch_size=256", "precision=bf16")),
    "step_32": ("c", "batch 32", ("batch_size=32",)),
}
CODEC_TESTS = ("tests/unit/codec/test_kernels.py", "tests/unit/codec/test_gpu_kernels.py")
TESTS = {
    "tests_codec": ("a", CODEC_TESTS, "the codec's kernels"),
    "tests_alone": ("b", ("tests/gpu", "-k", "test_alone"), "a rank alone"),
    "tests_two": ("c", ("tests/gpu", "-k", "test_shared and 2"), "two ranks share"),
    "tests_three": ("d", ("tests/gpu", "-k", "test_shared and 3"), "three ranks share"),
    "tests_rest": (
        "e",
        ("tests/gpu", "-k", "not test_alone and not test_shared and not several_gpus"),
        "the others",
    ),
}


def one_gpu(machine: Machine) -> Iterator[Item]:
    """Make the checklist's items 1 to 9."""
    yield _machine(machine)
    yield _main_job()
    yield from (tests(f"3{part}", name, *rest) for name, (part, *rest) in TESTS.items())
    yield from (_codec(machine, *each) for each in zip("abcde", ENCODE, strict=True))
    yield _host_waits()
    yield from (_steps(machine, name, *about) for name, about in STEPS.items())
    yield from (_layers(machine, part, batch_size) for part, batch_size in (("a", 256), ("b", 32)))
    yield _shared()
    yield _memory(machine)


def train(name: str, *settings: str) -> tuple[str, ...]:
    """Compose the words of a run in the checklist's study."""
    return ("-m", "lab.train", *settings, f"study={STUDY}", f"cell={name}")


def bench(machine: Machine, name: str, benchmark: str, *settings: str) -> tuple[str, ...]:
    """Compose the words of a benchmark that writes its result to the checklist's folder."""
    return ("-m", "lab.bench", benchmark, *settings, f"out={machine.folder / name}.json")


def tests(key: str, name: str, words: tuple[str, ...], title: str, num_gpus: int = 1) -> Item:
    """Make an item that runs tests: none may fail or be skipped."""
    command = Command(
        name,
        ("-m", "pytest", *words, "-o", "addopts=", "-o", "filterwarnings=default"),
        environment={"LAB_TEST_DEVICE": "cuda"},
    )
    sharing = "NCCL lets ranks share a GPU; else those that need send and recv"
    figures = (
        Figure("failed", "tests", printed(name, r"(\d+) failed"), 0, 0, "they pass"),
        Figure("passed", "tests", printed(name, r"(\d+) passed"), 1, math.inf, "they were run"),
        Figure("skipped", "tests", printed(name, r"(\d+) skipped"), 0, 0, sharing),
    )
    return Item(key, f"tests: {title}", (command,), figures, num_gpus)


def _machine(machine: Machine) -> Item:
    def is_here(name: str, key: str, why: str) -> Figure:
        return Figure(name, "", value("hardware", key), 1, 1, why)

    clock, is_h200 = value("hardware", "max_sm_mhz"), machine.has("H200")
    figures = (
        is_here("new enough driver", "driver_is_new_enough", "580 for CUDA 13, 525 for CUDA 12"),
        is_here("C compiler", "compiler", "Triton compiles its launcher with it"),
        is_here("Python.h", "python_header", "which that includes"),
        Figure("GPUs with MIG", "", value("hardware", "num_mig"), 0, 0, "an instance is a part"),
        Figure("highest SM clock", "MHz", clock, 1980, 1980, "an H200's", is_h200),
    )
    return Item("1", "the machine", (), figures)


def _main_job() -> Item:
    def flags_on(results: Results) -> float:
        return float(sum(results.record("main")["environment"]["tf32"].values()))

    command = Command("main", train("main", "strategy=onebit"), num_ranks=1, one_gpu=True)
    done = is_recorded("main", status="done", backend="nccl", device="cuda")
    figures = (
        Figure("done, over NCCL, on the GPU", "", done, 1, 1, "the main job"),
        Figure("accuracy", "%", recorded("main", "final.accuracy", 100), 95, 99, "96.9 on CPUs"),
        Figure("TF32 flags that are on", "", flags_on, 0, 0, "tf32=false sets both"),
    )
    return Item("2", "main job, 1-bit SGD", (command,), figures)


def _codec(machine: Machine, part: str, columns: int) -> Item:
    name = f"codec_{columns}"
    settings = ("device=cuda", "num_values=400_000_000", f"columns={columns}", "rounds=30")
    words = bench(machine, name, "codec", *settings, "codec=[onebit,onebit_mean]")
    copy, peak = value(name, "reference.gb_per_s"), machine.memory_gb_per_s

    def share(operation: str, low: float, why: str) -> Figure:
        read = row(name, "of_bandwidth.median", codec="onebit", operation=operation)
        return Figure(operation, "of copy's rate", read, low, 1.05, why)

    low, high = ((part * peak) if peak else math.nan for part in (0.82, 0.93))
    figures = (
        Figure("wrong values", "", total(name, "wrong"), 0, 0, "bits are the reference's"),
        Figure("copy", "GB/s", copy, low, high, "0.82 to 0.93 of the memory's peak", bool(peak)),
        share("encode", *ENCODE[columns]),
        share("decode", 0.6, "a message, and the sum read and written"),
    )
    command = Command(name, words, one_gpu=True)
    return Item(f"4{part}", f"codec, rows of {columns}", (command,), figures)


def _host_waits() -> Item:
    def run(steps: int) -> Command:
        name = f"waits_{steps}"
        settings = list(train(name, "strategy=onebit", "model=alexnet_small", f"steps={steps}")[2:])
        script = (
            "import sys, torch; torch.cuda.set_sync_debug_mode('warn'); "
            f"from lab.train import main; sys.exit(main({settings}))"
        )
        return Command(name, ("-W", "always", "-c", script), one_gpu=True)

    waits = per_step("waits_24", "waits_8", "called a synchronizing", steps=16)
    figure = Figure("host waits", "a step", waits, 0, 0, "what 16 more steps add: none in a step")
    return Item("5", "waits of the host", (run(8), run(24)), (figure,))


def _steps(machine: Machine, name: str, part: str, title: str, changed: tuple[str, ...]) -> Item:
    settings = ("strategy=none,overlap,onebit,ddp", *ALEXNET, *changed, "steps=80", "world_size=1")
    command = Command(name, bench(machine, name, "step", *settings), one_gpu=True)

    def to_none(strategy: str) -> Read:
        key = "step_s.median"
        return ratio(row(name, key, name=strategy), row(name, key, name="none"))

    onebit_ms = less(name, "step_s.median", 1e3, "onebit", "none")
    alone = "nothing travels from a single rank"
    figures = (
        Figure("overlap / none", "", to_none("overlap"), 0.97, 1.03, alone),
        Figure("ddp / none", "", to_none("ddp"), 0.97, 1.03, alone),
        Figure("onebit - none", "ms", onebit_ms, 0.3, 2, "2.5 GB of memory, 24 launches at most"),
    )
    return Item(f"6{part}", f"steps of AlexNet, {title}", (command,), figures)


def _layers(machine: Machine, part: str, batch_size: int) -> Item:
    name = f"layers_{batch_size}"
    out = f"out={machine.folder / name}.yaml"
    words = ("-m", "lab.profile_layers", *ALEXNET, f"batch_size={batch_size}", out)
    to_kernels = ratio(layers_ms(name), printed(name, r"torch\.profiler: ([\d.]+) ms"))
    step_ms = row(f"step_{batch_size}", "step_s.median", 1e3, name="none")
    to_step = ratio(layers_ms(name), step_ms)
    figures = (
        Figure("layers / kernels", "", to_kernels, 0.95, 1.1, "gaps between kernels are small"),
        Figure("layers / step of none", "", to_step, 0.85, 1.1, "update and data are not in them"),
    )
    title = f"layers of AlexNet, batch {batch_size}"
    return Item(f"7{part}", title, (Command(name, words, one_gpu=True),), figures)


def _shared() -> Item:
    settings = ("strategy=overlap", "share_gpus=true", "backend=gloo", "steps=400")
    words = train("shared", *settings)
    command = Command("shared", words, num_ranks=2, one_gpu=True, counts_processes=True)
    done = is_recorded("shared", status="done", backend="gloo", device="cuda")
    emulated = says("shared", "2 ranks share 1 GPU")
    figures = (
        Figure("done, over Gloo, on the GPU", "", done, 1, 1, "Gloo moves tensors of GPUs"),
        Figure("recorded as an emulation", "", emulated, 1, 1, "ranks share"),
        Figure("processes on the GPU", "", seen("shared", "on_one_gpu"), 2, 2, "one a rank"),
    )
    return Item("8", "two ranks share the GPU", (command,), figures)


def _memory(machine: Machine) -> Item:
    settings = ("strategy=overlap,onebit", *ALEXNET, "batch_size=64", "world_size=1")
    words = bench(machine, "memory_1", "memory", *settings)
    figures = tuple(
        Figure(
            f"{name} / theory",
            "",
            row("memory_1", "of_theory", name=name),
            0.95,
            1.1,
            "the formulas of lab/simulate/strategy.py",
        )
        for name in ("overlap", "onebit")
    )
    return Item("9", "peak memory of a step", (Command("memory_1", words, one_gpu=True),), figures)
