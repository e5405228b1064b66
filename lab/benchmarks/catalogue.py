"""All benchmarks, and the settings that each takes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

NUM_RANKS = 2  # the default
NUM_VALUES = {
    "cpu": 25_000_000,
    "cuda": 400_000_000,
}  # larger than the caches, which are large on GPUs
OWN = {
    "out": ("null", "FILE.json for the result; its figure is written next to it"),
    "world_size": (
        "null",
        "ranks to start, unless a launcher has; null: 2, or 1 with one GPU (recording: 1, "
        "straggler: 4)",
    ),
    "runs": ("100", "straggler: runs with a planted delay, and as many without one"),
    "rounds": (
        "20",
        "certificate, collective, reduce_scatter, codec, convolution, host, layout, layers, "
        "throughput",
    ),
    "sizes": (
        "[4KiB,64KiB,1MiB,16MiB,64MiB]",
        "collective, reduce_scatter: sizes; MiB is 2**20 bytes, MB 10**6, likewise for k and G",
    ),
    "codec": ("null", "codec: a list of codecs; null: all"),
    "algorithm": ("null", "convolution: a list of algorithms; null: all"),
    "num_values": ("null", "codec: float32 values; null: 25 M on CPUs, on GPUs 400 M"),
    "columns": ("4096", "codec: values that share two reconstruction values"),
    "trace": ("null", "counters, transfer: FILE.json or FILE.json.gz, of torch.profiler"),
    "l1": ("32768,8,64", "counters: first data cache: bytes, ways, bytes of a line"),
    "l2": ("8388608,16,64", "counters: the second one"),
    "isa": ("avx", "counters: instructions of oneDNN and MKL, avx or avx2 (far slower)"),
    "memory_gb": ("null", "footprint: also find the largest batch for a device of so many GB"),
    "num_ranks": ("1", "footprint: ranks that share the batch and exchange by strategy="),
    "measured": ("false", "footprint: true also trains steps, and measures resident memory"),
    "threads": ("2", "codec, convolution, layout, layers, throughput, roofline: threads, on CPUs"),
    "input_grad": ("false", "layers: true computes the gradient of the model's input too"),
}
# What one device does: nothing is exchanged, and nothing copied into buckets.
ALONE = ("strategy=none",)
NOTHING_SENT = "nothing is exchanged; must be at least 2"


@dataclass(frozen=True)
class Bench:
    """The settings that one benchmark takes.

    Attributes:
        text: describes it in a line.
        own: keys of OWN that it takes, besides out.
        group: the setting that it compares, unless another setting has the list.
        default: choices of that group, if none are given.
        num_variants: least number of variants.
        only: settings of a run that it uses; empty: all of them.
        fixed: settings that all its runs have.
        apart: each variant has fresh ranks of its own.
        environment: variables set for its ranks.
        sets: sets of settings that it compares, unless others are given.
        runs: the benchmark that measures them; empty: itself.
        module: measures and shows it; empty: the one of lab.benchmarks with its name.
        num_ranks: ranks to start unless told otherwise; 0: as many as the machine allows, at most
            NUM_RANKS.
        one_rank: why one rank alone is refused; empty: it is not.
    """

    text: str
    own: tuple[str, ...]
    group: str = "strategy"
    default: str = ""
    num_variants: int = 1
    only: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    apart: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    sets: tuple[tuple[str, ...], ...] = ()
    runs: str = ""
    module: str = ""
    num_ranks: int = 0
    one_rank: str = ""


BENCHES = {
    "collective": Bench(
        "all-reduces by size, exchange=A,B,..., with nccl-tests' columns",
        ("sizes", "rounds", "world_size"),
        group="exchange",
        default="allreduce,ring,tree",
        only=(
            *("exchange", "comm", "backend", "device", "share_gpus", "exchange_timeout_s"),
            "cluster",
        ),
        one_rank=f"{NOTHING_SENT}. With one GPU set device=cpu, or world_size=2 share_gpus=true "
        "backend=gloo exchange=bf16 (Gloo has no send and recv on GPUs)",
    ),
    "reduce_scatter": Bench(
        "the lab's reduce-scatter by size, compared with torch's, and the bytes that crossed",
        ("sizes", "rounds", "world_size"),
        default="none",
        only=("comm", "backend", "device", "share_gpus", "exchange_timeout_s", "cluster"),
        one_rank=NOTHING_SENT,
    ),
    "codec": Bench(
        "encode and decode, compared with torch.add on the same tensors",
        ("codec", "num_values", "columns", "threads", "rounds"),
        default="none",
        only=("device",),
    ),
    "step": Bench(
        "step times of strategy=A,B,... in turns, as ratios to the last",
        ("world_size",),
        num_variants=2,
    ),
    "hook": Bench(
        "the same of hooks in DDP, and of the trainer's own exchange",
        ("world_size",),
        sets=(
            ("strategy=onebit", "sync=ddp", "sync.hook=lab"),
            # One bucket: over Gloo torch's hook fails with several.
            ("strategy=ddp", "sync.hook=powersgd", "bucket_mb=10000"),
            ("strategy=ddp", "sync.hook=fp16"),
            ("strategy=ddp",),
            ("strategy=onebit",),
        ),
        runs="step",
    ),
    "memory": Bench(
        "peak memory of strategy=A,B,... next to theory",
        ("world_size",),
        default="allreduce,overlap,onebit,ddp",
        apart=True,
        # glibc then returns freed blocks at once, so that resident memory is memory in use.
        environment=(("MALLOC_MMAP_THRESHOLD_", "262144"),),
    ),
    "host": Bench(
        "processor time that strategy=A,B,... adds to the training thread, beside torch's DDP",
        ("rounds",),
        default="overlap,onebit,int8,topk,powersgd",
        only=(
            *("model", "data", "task", "transform", "strategy", "exchange", "sync", "overlap"),
            *("bucket_mb", "precision", "seed"),
        ),
    ),
    "recording": Bench(
        "what the lab's own book-keeping adds to a step",
        ("world_size",),
        default="none",
        num_ranks=1,
    ),
    "straggler": Bench(
        "delays planted into phases of ranks, found by rank and phase or not",
        ("runs", "world_size"),
        default="overlap",
        fixed=(
            *("model=replay", "profile=alexnet_titanx", "data=synthetic", "data.shape=[1,8,8]"),
            *("model.bytes_scale=0.002", "model.time_scale=0.3", "batch_size=1024", "steps=30"),
        ),
        num_ranks=4,
    ),
    "marks": Bench(
        "what the marks of a rank's own times add to a step, in turns with none",
        ("world_size",),
        default="overlap",
    ),
    "certificate": Bench(
        "what check=first adds to the first three steps of strategy=A,B,..., in steps",
        ("rounds", "world_size"),
        default="overlap,onebit,int8,ddp",
    ),
    "convolution": Bench(
        "algorithms on a model's convolutions: time, operations, workspace, error",
        ("algorithm", "rounds", "threads"),
        default="none",
        only=("model", "data", "task", "batch_size", "device", "seed"),
        module="lab.device.convolution",
    ),
    "layout": Bench(
        "a model's convolutions and steps in NCHW, NHWC, blocked and mixed layouts, and reorders",
        ("rounds", "threads"),
        default="none",
        only=(
            *("model", "data", "task", "optim", "precision", "tf32", "batch_size"),
            *("device", "seed"),
        ),
        module="lab.device.layout",
    ),
    "counters": Bench(
        "instructions, loads, stores and cache hits of each layer, by callgrind, on CPUs; with "
        "trace=FILE metrics of kernels that a GPU counted",
        ("l1", "l2", "isa", "trace"),
        group="batch_size",
        default="4",
        fixed=ALONE,
        only=("model", "data", "task", "transform", "batch_size", "device", "seed"),
        module="lab.device.counters",
    ),
    "footprint": Bench(
        "a step's memory by kind, and the largest batch, computed",
        ("memory_gb", "measured", "num_ranks"),
        group="batch_size",
        default="64,128,256",
        fixed=ALONE,
        only=(
            *("model", "data", "task", "transform", "optim", "precision", "batch_size", "seed"),
            *("strategy", "exchange", "sync", "overlap", "bucket_mb", "scaling", "device"),
        ),
        module="lab.device.footprint",
    ),
    "transfer": Bench(
        "copies between host and device in trace=FILE: number, bytes, rate, share hidden",
        ("trace",),
        default="none",
        only=("trace",),
        module="lab.device.transfer",
    ),
    "layers": Bench(
        "forward, backward data and backward weights of each layer, and the rest of a step",
        ("rounds", "threads", "input_grad"),
        group="batch_size",
        default="32",
        fixed=ALONE,
        only=(
            *("model", "data", "task", "transform", "optim", "precision", "tf32", "batch_size"),
            *("channels_last", "compile", "device", "seed"),
        ),
        module="lab.device.layers",
    ),
    "throughput": Bench(
        "samples per second by batch, training and inference, and the knee",
        ("rounds", "threads"),
        group="batch_size",
        default="4,8,16,32,64,128",
        fixed=ALONE,
        only=(
            *("model", "data", "task", "transform", "optim", "precision", "tf32", "batch_size"),
            *("channels_last", "compile", "device", "seed"),
        ),
        module="lab.device.throughput",
    ),
    "roofline": Bench(
        "layers by operations per byte, under this machine's measured peaks",
        ("threads",),
        default="none",
        only=(
            *("model", "data", "task", "transform", "precision", "tf32", "batch_size"),
            *("channels_last", "device", "seed"),
        ),
        module="lab.device.roofline",
    ),
}


def module_of(bench: str) -> ModuleType:
    """Import what measures and shows a benchmark; it imports torch, which help does not need."""
    return importlib.import_module(BENCHES[bench].module or f"lab.benchmarks.{bench}")
