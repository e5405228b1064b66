"""The items of the report in order of value: what each measures, how long it takes, its bounds.

An item is one or several benchmarks of lab.bench, in this process, on one rank. Where a device
pretends, sizes are so small that a CPU goes through all of them in a minute.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from lab.benchmarks.catalogue import BENCHES, module_of
from lab.benchmarks.harness import joined, wait_for
from lab.benchmarks.request import read
from lab.measure.environment import num_cores
from lab.measure.layers import kernels_ms
from lab.settings.config import ConfigError, load
from lab.training.assemble import assembled

Result = dict[str, Any]  # "benches": results of lab.bench, and what an item adds to them
STRATEGIES = ("none", "overlap", "onebit", "int8", "powersgd", "ddp")
CODECS = "onebit,onebit_mean,int8,int4,signs,topk,randomk,powersgd,bf16"
BY_LENGTH = "onebit,onebit_mean,signs,powersgd"  # codecs whose rows are the parameters' own
LENGTHS = (4096, 64, 363, 9216, 25088)
PRECISIONS = {"fp32": "precision=fp32", "tf32": "tf32=true", "bf16": "precision=bf16"}
METRICS = ["dram__bytes_read.sum", "dram__bytes_write.sum", "sm__inst_executed.sum"]
COPIED_BYTES, COPIES = (4_000, 400_000, 40_000_000), 5
PROFILED, UNPROFILED = 3, 4  # steps
PRETENDED = "a GPU, by a CPU at tiny sizes: no number is a GPU's"


@dataclass(frozen=True)
class Figure:
    """A number beside its bound.

    Attributes:
        low, high: bounds, of which there is at most one; without one the number is noted.
    """

    name: str
    value: float | None
    unit: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        """Write "met", or by how much the bound is missed; nothing without a bound."""
        bound = self.high if self.low is None else self.low
        if bound is None:
            return ""
        if self.value is None:
            return "not known"
        far = self.value - bound if self.low is None else bound - self.value
        return "met" if far <= 0 else f"missed by {far:.3g}"

    @property
    def bound(self) -> str:
        """Write the bound."""
        if self.low is None and self.high is None:
            return ""
        return f"at most {self.high:g}" if self.low is None else f"at least {self.low:g}"


@dataclass(frozen=True)
class Item:
    """A part of the report.

    Attributes:
        key: names it. seconds: what it takes on an H100, estimated; without so many left it is
            skipped.
        measure: returns what is measured. figures: of its result.
        draws: whether the page has the figure of each benchmark.
    """

    key: str
    about: str
    seconds: float
    measure: Callable[[], Result]
    figures: Callable[[Result], Iterator[Figure]]
    draws: bool = True


@dataclass(frozen=True)
class Sizes:
    """Settings of each model, on a GPU or where a CPU pretends to be one."""

    pretended: bool

    def model(self, name: str, batch: int) -> list[str]:
        """Return the settings of a model and its batch, with data for steps and inference."""
        batch = 4 if self.pretended else batch
        many = 8 * batch  # an eighth of it are test samples
        images = ["data=synthetic", "data.num_classes=1000", f"data.num_images={many}"]
        tokens = ["task=language_modelling", "data=synthetic_tokens"]
        tokens += [f"data.num_sequences={many}"]
        if name == "gpt2" and self.pretended:
            small = [*("layers", "heads"), "width"], (1, 1, 16)
            chosen = [f"model.{key}={value}" for key, value in zip(*small, strict=True)]
            own = ["model=transformer", *chosen, *tokens, "data.vocabulary=64", "data.context=8"]
        elif name == "gpt2":
            own = ["model=transformer", "model.size=small", *tokens]
            own += ["data.vocabulary=50257", "data.context=1024"]
        elif self.pretended:
            own = ["model=lenet", *images, "data.shape=[1,16,16]"]
        else:
            own = [f"model={name}", *images, "data.shape=[3,224,224]"]
        device = "cpu" if self.pretended else "cuda"
        return [*own, f"batch_size={batch}", f"device={device}", "optim.lr=0.001"]

    def steps(self, num: int) -> list[str]:
        """Return the settings of so many steps, after a warm-up."""
        return ["steps=14", "warmup_steps=2"] if self.pretended else [f"steps={num}"]

    def rounds(self, num: int) -> str:
        """Return the setting of so many rounds."""
        return f"rounds={2 if self.pretended else num}"


def bench(words: Sequence[str], sizes: Sizes) -> Result:
    """Run a benchmark in this process; return what lab.bench would write to its JSON."""
    if sizes.pretended:  # beside other work, threads that wait for each other take seconds
        torch.set_num_threads(1)
        words = [*words, *(["threads=1"] if "threads" in BENCHES[words[0]].own else [])]
    request = read([*words])
    found = module_of(request.bench).measure(request)
    if sizes.pretended:
        found["emulation"] = PRETENDED
    command = shlex.join(["python", "-m", "lab.bench", *words])
    return {"bench": request.bench, "command": command, **found}


def items_of(sizes: Sizes) -> list[Item]:
    """Return all items in order of value."""
    model = sizes.model
    small = {"alexnet": (32, 15), "resnet50": (32, 25), "gpt2": (4, 25), "vgg16": (32, 40)}
    steps = [
        _steps(f"steps-{name}-{batch}", name, batch, seconds, sizes)
        for name, (batch, seconds) in (*small.items(), ("alexnet", (256, 25)))
    ]
    graphs = [
        Item(
            *(f"graph-{name}-{batch}", f"{name}, batch {batch}: eager over graph=true", 25),
            partial(_graphs, model(name, batch), sizes),
            _figures_of_graphs,
        )
        for name, (batch, _) in small.items()
    ]
    codecs = [_codecs(length, sizes) for length in LENGTHS]
    hosts = [_host(name, sizes) for name in ("alexnet", "resnet50", "gpt2")]
    first, rest = [steps[0], graphs[0], codecs[0]], [*steps[1:], *codecs[1:], *graphs[1:]]
    items = [*first, *rest, *hosts, *_utilisations(sizes), *_seeds(sizes), *_compiled(sizes)]
    return [replace(item, seconds=1) for item in items] if sizes.pretended else items


def _without(words: Sequence[str], *keys: str) -> list[str]:
    return [word for word in words if not (keys and word.startswith(keys))]


def _benches(words: Sequence[str], sizes: Sizes) -> Callable[[], Result]:
    return lambda: {"benches": [bench(words, sizes)]}


def _no_figures(_result: Result) -> Iterator[Figure]:
    yield from ()


def _steps(key: str, name: str, batch: int, seconds: float, sizes: Sizes) -> Item:
    """Compare strategies by steps in turns, and count the kernels of those that encode."""
    words = [*sizes.model(name, batch), *(["precision=bf16"] if name == "gpt2" else [])]
    compared = [*words, *sizes.steps(45), f"strategy={','.join(STRATEGIES)}", "world_size=1"]

    def measure() -> Result:
        found = bench(["step", *compared], sizes)
        counted = ("none", "onebit", "int8", "powersgd")
        kernels_s = {each: _kernels_s([*words, f"strategy={each}"]) for each in counted}
        return {"benches": [found], "kernels_s": kernels_s}

    def figures(result: Result) -> Iterator[Figure]:
        rows = {row["name"]: row["step_s"]["median"] for row in result["benches"][0]["rows"]}
        yield Figure("overlap / ddp", rows["overlap"] / rows["ddp"], high=1.0)
        plain_s = result["kernels_s"]["none"]
        for each in ("onebit", "int8", "powersgd"):
            added_s = rows[each] - rows["none"]
            own_s = result["kernels_s"][each] - plain_s
            yield Figure(f"{each} - none", 1e3 * added_s, "ms")
            bound = 1.5 if (each, batch) == ("onebit", 32) else None
            share = added_s / own_s if own_s > 0 else None
            yield Figure(f"{each} - none / its kernels", share, high=bound)

    return Item(key, f"{name}, batch {batch}: steps of each strategy", seconds, measure, figures)


def _graphs(words: Sequence[str], sizes: Sizes) -> Result:
    """Compare each strategy with itself as one graph; those that refuse say why."""
    ways, refused = list[Result](), dict[str, str]()
    common = [*words, *sizes.steps(45), "world_size=1"]
    for strategy in STRATEGIES:
        sets = [f"a=strategy={strategy}", f"b=strategy={strategy} graph=true"]
        try:
            ways.append({"strategy": strategy, **bench(["step", *common, *sets], sizes)})
        except ConfigError as error:
            refused[strategy] = str(error)
    if not ways:
        raise ConfigError(next(iter(refused.values())))
    return {"benches": ways, "refused": refused}


def _figures_of_graphs(result: Result) -> Iterator[Figure]:
    for way in result["benches"]:
        gain = way["rows"][0]["ratio"]["median"]
        yield Figure(f"{way['strategy']}, eager / graph", gain, low=1.0)


def _codecs(length: int, sizes: Sizes) -> Item:
    names = CODECS if length == LENGTHS[0] else BY_LENGTH
    device, values = ("cpu", 2 * length) if sizes.pretended else ("cuda", 200_000_000)
    words = [f"codec=[{names}]", f"num_values={values}", f"columns={length}", f"device={device}"]
    seconds = 30 if length == LENGTHS[0] else 12
    about = f"codecs on rows of {length}: share of a copy's rate"
    measure = _benches(["codec", *words, sizes.rounds(8)], sizes)
    draws = length == LENGTHS[0]
    return Item(f"codecs-{length}", about, seconds, measure, _figures_of_codecs, draws)


def _figures_of_codecs(result: Result) -> Iterator[Figure]:
    (found,) = result["benches"]
    yield Figure("copy", found["reference"]["gb_per_s"], "GB/s")
    for row in found["rows"]:
        name = f"{row['codec']} {row['operation']}"
        yield Figure(name, row["of_bandwidth"]["median"], "of copy", low=0.8)
    yield Figure("wrong values", sum(row["wrong"] for row in found["rows"]), high=0)


def _host(name: str, sizes: Sizes) -> Item:
    words = ["host", *_without(sizes.model(name, 32), "batch_size", "optim"), sizes.rounds(15)]
    measure = _benches([*words, "strategy=overlap,onebit,int8,topk,powersgd"], sizes)
    return Item(f"host-{name}", f"{name}: host time", 8, measure, _figures_of_host)


def _figures_of_host(result: Result) -> Iterator[Figure]:
    for row in result["benches"][0]["rows"][1:]:
        bound = 1.2 if row["name"] in ("onebit", "int8") else None
        yield Figure(f"{row['name']}, host", row["over_ddp"]["median"], "x DDP", high=bound)


def _utilisations(sizes: Sizes) -> Iterator[Item]:
    batches = {"alexnet": 256, "resnet50": 128, "gpt2": 8, "vgg16": 64}
    for precision, word in PRECISIONS.items():
        for name, batch in batches.items():
            words = ["throughput", *sizes.model(name, batch), word, sizes.rounds(6)]
            about = f"{name}, batch {batch}, {precision}: utilisation of the peak"
            measure = _benches(words, sizes)
            key = f"mfu-{name}-{precision}"
            yield Item(key, about, 7, measure, _figures_of_rates, draws=False)


def _compiled(sizes: Sizes) -> Iterator[Item]:
    """Return what takes longest for its figure, and counters, which may spoil later profiles."""
    for name, batch in {"alexnet": 256, "gpt2": 8, "resnet50": 128, "vgg16": 64}.items():
        compiles = [] if sizes.pretended else ["compile=true"]  # a CPU's compiler takes minutes
        words = ["throughput", *sizes.model(name, batch), PRECISIONS["bf16"], *compiles]
        about = f"{name}, batch {batch}, bf16, compiled: utilisation of the peak"
        measure = _benches([*words, sizes.rounds(6)], sizes)
        yield Item(f"mfu-{name}-compiled", about, 45, measure, _figures_of_rates, draws=False)
    yield _traced("counters", "what kernels of AlexNet read, write and execute", sizes)


def _figures_of_rates(result: Result) -> Iterator[Figure]:
    for row in result["benches"][0]["rows"]:
        share, rate = row["utilisation"], row["flops_per_s"]
        yield Figure(f"{row['model']} at {row['batch_size']}", rate and 1e-12 * rate, "TFLOP/s")
        yield Figure(f"{row['model']}, share of the peak", share and 100 * share, "%")


def _seeds(sizes: Sizes) -> Iterator[Item]:
    """Return the tables of one device: rates by batch, CPU, layers, layouts, algorithms, copies."""
    model, rounds = sizes.model, sizes.rounds
    batches = "1,2,4" if sizes.pretended else "1,8,64,512"
    by_batch = [*_without(model("alexnet", 512), "batch_size"), f"batch_size={batches}"]
    about = "AlexNet: samples per second by batch"
    words = ["throughput", *by_batch, rounds(5)]
    yield Item("throughput", about, 25, _benches(words, sizes), _no_figures)
    about = "AlexNet, batch 64: GPU against CPU"
    yield Item("cpu", about, 15, partial(_cpu, sizes), _speedup, draws=False)
    simple = {
        "layers": ("alexnet", 256, 10, [rounds(10)]),
        "layout": ("alexnet", 128, 20, [rounds(5)]),
        "convolution": ("alexnet", 32, 40, [rounds(6)]),
        "roofline": ("resnet50", 64, 15, []),
    }
    for key, (name, batch, seconds, more) in simple.items():
        unused = ["optim"] if key in ("convolution", "roofline") else []
        words = [key, *_without(model(name, batch), *unused), *more]
        about = f"{name}, batch {batch}: {BENCHES[key].text}"
        yield Item(key, about, seconds, _benches(words, sizes), _no_figures)
    yield _traced("copies", "copies between host and device, and in steps of AlexNet", sizes)


def _cpu(sizes: Sizes) -> Result:
    words = ["throughput", *sizes.model("alexnet", 64), sizes.rounds(3)]
    on_cpu = [*_without(words, "device"), "device=cpu"]
    on_cpu += [] if sizes.pretended else [f"threads={num_cores()}"]
    return {"benches": [bench(words, sizes), bench(on_cpu, sizes)]}


def _speedup(result: Result) -> Iterator[Figure]:
    gpu, cpu = (found["rows"][0] for found in result["benches"])
    for way in ("training", "inference"):
        yield Figure(f"{way}, GPU / CPU", gpu[way]["median"] / cpu[way]["median"])


def _traced(key: str, about: str, sizes: Sizes) -> Item:
    """Record a trace, and read it by the benchmark that reads such traces."""
    words = [*sizes.model("alexnet", 64), "strategy=none"]
    name, metrics = ("counters", METRICS) if key == "counters" else ("transfer", [])

    def measure() -> Result:
        profiler = _profiled(words, metrics, _copy if name == "transfer" else wait_for)
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{key}.json"
            profiler.export_chrome_trace(str(path))
            found = bench([name, f"trace={path}"], sizes)
        return {"benches": [{**found, "command": f"python -m lab.bench {name} trace={path.name}"}]}

    return Item(key, about, 10, measure, _no_figures)


def _kernels_s(words: Sequence[str]) -> float:
    """Return the seconds of a step's kernels without the optimizer's; on a CPU, of operations."""
    averages = _profiled(words, [], wait_for).key_averages()
    if any(each.device_type == DeviceType.CUDA for each in averages):
        return kernels_ms(averages, PROFILED) / 1e3
    return sum(each.self_cpu_time_total for each in averages) / PROFILED / 1e6


def _profiled(
    words: Sequence[str], metrics: Sequence[str], ends: Callable[[torch.device], None]
) -> profile:
    """Profile steps of a run, after others.

    Args:
        metrics: counted for each kernel, by CUPTI. ends: called after the steps, and waits for all.
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
