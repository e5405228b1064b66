"""The items of the report in order of value: what each measures, how long it takes, its bounds.

Nothing here imports torch: lab.gpu_report.measuring measures what the words of an item say. Where a
CPU pretends to be a GPU, sizes are so small that it goes through all items in a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.benchmarks.catalogue import BENCHES
from lab.settings.errors import ConfigError

Result = dict[str, Any]  # "benches": results of lab.bench, and what an item adds to them
STRATEGIES = ("none", "overlap", "onebit", "int8", "powersgd", "ddp")
CODECS = "onebit,onebit_mean,int8,int4,signs,topk,randomk,powersgd,bf16"
BY_LENGTH = "onebit,onebit_mean,signs,powersgd"  # codecs whose rows are the parameters' own
LENGTHS = (4096, 64, 363, 9216, 25088)
PRECISIONS = {"fp32": "precision=fp32", "tf32": "tf32=true", "bf16": "precision=bf16"}
# Batch, and seconds that its steps take by all strategies, with their kernels.
SMALL = {"alexnet": (32, 15), "resnet50": (32, 25), "gpt2": (4, 25), "vgg16": (32, 45)}
LARGE = {"alexnet": 256, "resnet50": 128, "gpt2": 8, "vgg16": 64}
TRIED, TRIED_BATCH = "alexnet", 64


@dataclass(frozen=True)
class BoundedFigure:
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


Figures = Callable[[Result], Iterator[BoundedFigure]]


@dataclass(frozen=True)
class Item:
    """A part of the report.

    Attributes:
        key: names it. seconds: what it takes on an H100, estimated; without so many left it is
            skipped.
        kind: of lab.gpu_report.measuring.KINDS. words: of lab.bench, or settings of a run.
        figures: of its result. draws: whether the page has the figure of each benchmark.
    """

    key: str
    about: str
    seconds: float
    kind: str
    words: tuple[str, ...]
    figures: Figures = lambda _result: iter(())
    draws: bool = True


@dataclass(frozen=True)
class ReportSizes:
    """Settings of each model, on a GPU or where a CPU pretends to be one."""

    pretended: bool

    def model(self, name: str, batch: int) -> list[str]:
        """Return the settings of a model and its batch, with data for steps and inference."""
        batch = 4 if self.pretended else batch
        many = 8 * batch  # an eighth of it are test samples
        images = ["data=synthetic", "data.num_classes=1000", f"data.num_images={many}"]
        tokens = ["task=language_modelling", "data=synthetic_tokens", f"data.num_sequences={many}"]
        if name == "gpt2" and self.pretended:
            own = ["model=transformer", "model.layers=1", "model.heads=1", "model.width=16"]
            own += [*tokens, "data.vocabulary=64", "data.context=8"]
        elif name == "gpt2":
            own = ["model=transformer", "model.size=small", *tokens]
            own += ["data.vocabulary=50257", "data.context=1024"]
        elif self.pretended:
            own = ["model=lenet", *images, "data.shape=[1,16,16]"]
        else:
            own = [f"model={name}", *images, "data.shape=[3,224,224]"]
        device = "cpu" if self.pretended else "cuda"
        return [*own, f"batch_size={batch}", f"device={device}", "optim.lr=0.001"]

    def steps(self, name: str, batch: int) -> tuple[str, ...]:
        """Return the settings of a model's steps for several turns, after a warm-up."""
        half = ["precision=bf16"] if name == "gpt2" else []
        warmup = 2 if self.pretended else 15  # a graph is captured within these, too
        steps = f"steps={warmup + (12 if self.pretended else 60)}", f"warmup_steps={warmup}"
        return (*self.model(name, batch), *half, *steps, "world_size=1")

    def rounds(self, number: int) -> str:
        """Return the setting of so many rounds."""
        return f"rounds={2 if self.pretended else number}"


def items_of(sizes: ReportSizes) -> list[Item]:
    """Return all items in order of value."""
    steps = [_steps(name, batch, seconds, sizes) for name, (batch, seconds) in SMALL.items()]
    graphs = [_graphs(name, batch, seconds, sizes) for name, (batch, seconds) in SMALL.items()]
    codecs = [_codecs(length, sizes) for length in LENGTHS]
    items = [*(steps[0], graphs[0], codecs[0]), *steps[1:], _steps("alexnet", 256, 25, sizes)]
    items += [*codecs[1:], *graphs[1:]]
    items += [_host(name, sizes) for name in ("alexnet", "resnet50", "gpt2")]
    items += [*_utilisations(sizes), *_seeds(sizes), *_compiled(sizes)]
    return [replace(item, seconds=1) for item in items] if sizes.pretended else items


def chosen(items: Sequence[Item], names: Sequence[str] | None) -> list[Item]:
    """Select items by their keys, or by how these begin; None: all.

    Raises:
        ConfigError: a name fits none.
    """
    for name in names or ():
        if not any(item.key.startswith(name) for item in items):
            keys = ", ".join(item.key for item in items)
            raise ConfigError(
                f"items={name}: no such item; allowed: {keys}, or their first letters"
            )
    return [item for item in items if names is None or item.key.startswith(tuple(names))]


def _without(words: Sequence[str], *keys: str) -> list[str]:
    return [word for word in words if not word.startswith(keys)]


def _steps(name: str, batch: int, seconds: float, sizes: ReportSizes) -> Item:
    def figures(result: Result) -> Iterator[BoundedFigure]:
        step_s = {row["name"]: row["step_s"]["median"] for row in result["benches"][0]["rows"]}
        yield BoundedFigure("overlap / ddp", step_s["overlap"] / step_s["ddp"], high=1.0)
        kernels_s = result["kernels_s"]
        for lossy in ("onebit", "int8", "powersgd"):
            added_s, own_s = (of[lossy] - of["none"] for of in (step_s, kernels_s))
            yield BoundedFigure(f"{lossy} - none", 1e3 * added_s, "ms")
            bound = 1.5 if (lossy, batch) == ("onebit", 32) else None
            share = added_s / own_s if own_s > 0 else None
            yield BoundedFigure(f"{lossy} - none / its kernels", share, high=bound)

    about = f"{name}, batch {batch}: step time of each strategy"
    words = sizes.steps(name, batch)
    return Item(f"steps-{name}-{batch}", about, seconds, "steps", words, figures)


def _graphs(name: str, batch: int, seconds: float, sizes: ReportSizes) -> Item:
    def figures(result: Result) -> Iterator[BoundedFigure]:
        for way in result["benches"]:
            gain = way["rows"][0]["ratio"]["median"]
            yield BoundedFigure(f"{way['strategy']}, eager / graph", gain, low=1.0)

    words = sizes.steps(name, batch)
    about = f"{name}, batch {batch}: step time of each strategy, divided by that with graph=true"
    return Item(f"graph-{name}-{batch}", about, seconds + 5, "graphs", words, figures)


def _codecs(length: int, sizes: ReportSizes) -> Item:
    def figures(result: Result) -> Iterator[BoundedFigure]:
        (found,) = result["benches"]
        yield BoundedFigure("copy", found["reference"]["gb_per_s"], "GB/s")
        for row in found["rows"]:
            name = f"{row['codec']} {row['operation']}"
            yield BoundedFigure(name, row["of_bandwidth"]["median"], "of copy", low=0.8)
        yield BoundedFigure("wrong values", sum(row["wrong"] for row in found["rows"]), high=0)

    is_first = length == LENGTHS[0]
    device, values = ("cpu", 2 * length) if sizes.pretended else ("cuda", 200_000_000)
    words = ["codec", f"codec=[{CODECS if is_first else BY_LENGTH}]", f"num_values={values}"]
    words += [f"columns={length}", f"device={device}", sizes.rounds(8)]
    about, seconds = f"codecs on rows of {length}: share of a copy's rate", 30 if is_first else 12
    return Item(f"codecs-{length}", about, seconds, "bench", tuple(words), figures, is_first)


def _host(name: str, sizes: ReportSizes) -> Item:
    def figures(result: Result) -> Iterator[BoundedFigure]:
        for row in result["benches"][0]["rows"][1:]:
            bound = 1.2 if row["name"] in ("onebit", "int8") else None
            yield BoundedFigure(
                f"{row['name']}, host", row["over_ddp"]["median"], "x DDP", high=bound
            )

    words = ["host", *_without(sizes.model(name, 32), "batch_size", "optim"), sizes.rounds(15)]
    words += ["strategy=overlap,onebit,int8,topk,powersgd"]
    return Item(f"host-{name}", f"{name}: host time", 8, "bench", tuple(words), figures)


def _rates(result: Result) -> Iterator[BoundedFigure]:
    for row in result["benches"][0]["rows"]:
        share, rate = row["utilisation"], row["flops_per_s"]
        yield BoundedFigure(
            f"{row['model']} at {row['batch_size']}", rate and 1e-12 * rate, "TFLOP/s"
        )
        yield BoundedFigure(f"{row['model']}, share of the peak", share and 100 * share, "%")


def _utilisations(sizes: ReportSizes) -> Iterator[Item]:
    for precision, word in PRECISIONS.items():
        for name, batch in LARGE.items():
            words = ("throughput", *sizes.model(name, batch), word, sizes.rounds(6))
            about = f"{name}, batch {batch}, {precision}: share of the peak reached"
            yield Item(f"mfu-{name}-{precision}", about, 7, "bench", words, _rates, draws=False)


def _compiled(sizes: ReportSizes) -> Iterator[Item]:
    """Yield what takes longest for its figure, and counters, which may spoil later profiles."""
    for name, batch in LARGE.items():
        compiles = [] if sizes.pretended else ["compile=true"]  # a CPU's compiler takes minutes
        words = ["throughput", *sizes.model(name, batch), PRECISIONS["bf16"], *compiles]
        about = f"{name}, batch {batch}, bf16, compiled: share of the peak reached"
        key, words = f"mfu-{name}-compiled", [*words, sizes.rounds(6)]
        yield Item(key, about, 45, "bench", tuple(words), _rates, draws=False)
    about, words = "what AlexNet's kernels read, write and execute", _tried(sizes)
    yield Item("counters", about, 10, "counters", words)


def _tried(sizes: ReportSizes) -> tuple[str, ...]:
    return (*sizes.model(TRIED, TRIED_BATCH), "strategy=none")


def _seeds(sizes: ReportSizes) -> Iterator[Item]:
    """Yield the tables of one device: rates by batch, CPU, layers, layouts, algorithms, copies."""

    def speedup(result: Result) -> Iterator[BoundedFigure]:
        gpu, cpu = (found["rows"][0] for found in result["benches"])
        for way in ("training", "inference"):
            yield BoundedFigure(f"{way}, GPU / CPU", gpu[way]["median"] / cpu[way]["median"])

    batches = "1,2,4" if sizes.pretended else "1,8,64,512"
    by_batch = [*_without(sizes.model(TRIED, 512), "batch_size"), f"batch_size={batches}"]
    words = ("throughput", *by_batch, sizes.rounds(5))
    yield Item("throughput", f"{TRIED}: samples per second by batch size", 25, "bench", words)
    about = f"{TRIED}, batch {TRIED_BATCH}: GPU compared with CPU"
    words = ("throughput", *sizes.model(TRIED, TRIED_BATCH), sizes.rounds(3))
    yield Item("cpu", about, 15, "cpu", words, speedup, draws=False)
    for key, name, batch, seconds, more in (
        ("layers", "alexnet", 256, 10, [sizes.rounds(10)]),
        ("layout", "alexnet", 128, 20, [sizes.rounds(5)]),
        ("convolution", "alexnet", 32, 40, [sizes.rounds(6)]),
        ("roofline", "resnet50", 64, 15, []),
    ):
        trains = key in ("layers", "layout")
        model = sizes.model(name, batch)
        words = (key, *(model if trains else _without(model, "optim")), *more)
        about = f"{name}, batch {batch}: {BENCHES[key].text}"
        yield Item(key, about, seconds, "bench", words)
    about = f"copies between host and device, and in steps of {TRIED}"
    yield Item("copies", about, 10, "copies", _tried(sizes))
