"""All benchmarks: what each measures, and the settings that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NUM_RANKS = 2  # the default
NUM_VALUES = {"cpu": 25_000_000, "cuda": 400_000_000}  # larger than the caches
# Larger units first; of a pair, the one that has powers of two. IEC 80000-13.
UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "kB": 10**3, "B": 1}
VALUE_BYTES = 4  # everything that is measured is float32


def size_name(size: int) -> str:
    """Write a number of bytes in the largest unit that leaves no fraction: 64 KiB, 1 MB."""
    unit = next(unit for unit, num_bytes in UNITS.items() if size % num_bytes == 0)
    return f"{size // UNITS[unit]} {unit}"


NOTHING_SENT = "a single rank exchanges nothing; must be at least 2"
# Settings of a run that benchmarks of parts of it take.
PROBLEM = "model data task transform "
ALONE = f"{PROBLEM}optim precision tf32 batch_size channels_last compile device seed"
EXCHANGE = "exchange path codec memory"  # whole, or its parts
TALKING = "comm backend device share_gpus exchange_timeout_s cluster"
# Settings that hold for a whole process, as torch and NCCL have one value of each; and those with
# which ranks join, where all variants have one world.
OF_A_PROCESS = "deterministic tf32 benchmark_limit threads comm.deterministic"
OF_A_WORLD = f"{OF_A_PROCESS} comm backend device share_gpus exchange_timeout_s"


@dataclass(frozen=True)
class Bench:
    """The settings that one benchmark takes. Lists are words with blanks between them.

    Attributes:
        text: describes it in a line.
        own: settings of BenchSettings that it takes, besides out.
        group: the setting that it compares, unless another setting has the list.
        default: choices of that group, if none are given.
        num_variants: least number of variants.
        alone: it measures one set of settings.
        alike: settings that all variants must have in common.
        only: settings of a run that it uses; empty: all of them.
        fixed: settings that all its runs have.
        apart: each variant has fresh ranks of its own.
        environment: variables set for its ranks.
        sets: sets of settings that it compares, unless others are given.
        runs: the benchmark that measures them; empty: itself.
        package: of the module with its name, which measures and shows it.
        num_ranks: ranks to start unless told otherwise; 0: as many as the machine allows, at most
            NUM_RANKS.
        one_rank: why one rank alone is refused; empty: it is not.
    """

    text: str
    own: str
    group: str = "strategy"
    default: str = ""
    num_variants: int = 1
    alone: bool = False
    alike: str = OF_A_WORLD
    only: str = ""
    fixed: str = ""
    apart: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    sets: tuple[str, ...] = ()
    runs: str = ""
    package: str = "lab.benchmarks"
    num_ranks: int = 0
    one_rank: str = ""


def _of_device(text: str, own: str, only: str, **rest: Any) -> Bench:
    """Describe a benchmark of one device: nothing is exchanged, or copied into buckets."""
    if rest.get("group") == "batch_size":
        rest["fixed"] = "strategy=none"
    named: dict[str, Any] = {"default": "none"} | rest
    return Bench(text, own, only=only, package="lab.device", **named)


BENCHES = {
    "collective": Bench(
        "all-reduces of exchange=A,B,... by size, with the columns of nccl-tests",
        "sizes rounds world_size",
        group="exchange",
        default="allreduce,ring,tree",
        only=f"{EXCHANGE} {TALKING}",
        one_rank=f"{NOTHING_SENT}. With one GPU, set device=cpu, or world_size=2 share_gpus=true "
        "backend=gloo exchange=bf16 (Gloo has no send and recv on GPUs)",
    ),
    "reduce_scatter": Bench(
        "the lab's reduce-scatter by size, compared with torch's, and the bytes sent",
        "sizes rounds world_size",
        default="none",
        alone=True,
        only=TALKING,
        one_rank=NOTHING_SENT,
    ),
    "codec": Bench(
        "encode and decode times, compared with torch.add on the same tensors",
        "codec num_values columns threads rounds",
        default="none",
        alone=True,
        only="device",
    ),
    "step": Bench(
        "step times of strategy=A,B,..., measured in turn, as ratios to the last one",
        "world_size starts order_seed aa pairs",
        num_variants=2,
        alike=OF_A_PROCESS,
    ),
    "aa": Bench(
        "how often the step benchmark finds a difference between two equal candidates",
        "world_size starts order_seed pairs",
        default="overlap",
        alike=OF_A_PROCESS,
    ),
    "hook": Bench(
        "step times of hooks in DDP, and of the trainer's own exchange",
        "world_size starts order_seed",
        sets=(
            "strategy=onebit sync=ddp sync.hook=lab",
            # One bucket: over Gloo torch's hook fails with several.
            "strategy=ddp sync.hook=powersgd bucket_mb=10000",
            "strategy=ddp sync.hook=fp16",
            "strategy=ddp",
            "strategy=onebit",
        ),
        alike=OF_A_PROCESS,
        runs="step",
    ),
    "memory": Bench(
        "peak memory of strategy=A,B,..., compared with theory",
        "world_size",
        default="allreduce,overlap,onebit,ddp",
        alike=f"{PROBLEM}optim precision batch_size accumulate",  # the baseline's too
        apart=True,
        # glibc then returns freed blocks at once, so that resident memory is memory in use.
        environment=(("MALLOC_MMAP_THRESHOLD_", "262144"),),
    ),
    "host": Bench(
        "processor time that strategy=A,B,... adds to the training thread, compared with torch's "
        "DDP",
        "rounds starts order_seed",
        default="overlap,onebit,int8,topk,powersgd",
        alike=f"{PROBLEM}device seed",
        only=f"{PROBLEM}strategy {EXCHANGE} sync overlap bucket_mb precision device seed",
    ),
    "recording": Bench(
        "time that the lab's own recording adds to a step",
        "world_size",
        default="none",
        alone=True,
        num_ranks=1,
    ),
    "straggler": Bench(
        "delays injected into a rank's phases, and how many of them are found",
        "runs world_size",
        default="overlap",
        alone=True,
        fixed="model=replay profile=alexnet_titanx data=synthetic data.shape=[1,8,8] "
        "model.bytes_scale=0.002 model.time_scale=0.3 batch_size=1024 steps=30",
        num_ranks=4,
    ),
    "marks": Bench(
        "time that recording each rank's own times adds to a step",
        "world_size",
        default="overlap",
        alone=True,
    ),
    "calibrate": Bench(
        "link, host, codec and compute times of this cluster, as a hardware file (lab.calibrate)",
        "minutes world_size",
        group="exchange",
        default="allreduce,ring,tree,onebit,int8",
        only=f"{EXCHANGE} {TALKING}",
        # The steps whose predictions are checked: layers that wait, so only the exchange is tested.
        fixed="model=replay profile=alexnet_titanx data=synthetic data.shape=[1,8,8] "
        "batch_size=32 scaling=weak optim.lr=0.0",
        one_rank=NOTHING_SENT,
    ),
    "certificate": Bench(
        "time that check=first adds to the first three steps of strategy=A,B,...",
        "rounds world_size",
        default="overlap,onebit,int8,ddp",
        alike=OF_A_PROCESS,
    ),
    "convolution": _of_device(
        "algorithms for a model's convolutions: time, operations, workspace, error",
        "algorithm rounds threads",
        "model data task batch_size device seed",
        alone=True,
    ),
    "layout": _of_device(
        "a model's convolutions and steps in NCHW, NHWC, blocked and mixed layouts, and reorders",
        "rounds threads",
        "model data task optim precision tf32 batch_size device seed",
        alone=True,
    ),
    "counters": _of_device(
        "instructions, loads, stores and cache hits of each layer, by callgrind, on CPUs; with "
        "trace=FILE, kernel metrics counted by a GPU",
        "l1 l2 isa trace",
        f"{PROBLEM}batch_size device seed",
        group="batch_size",
        default="4",
    ),
    "footprint": _of_device(
        "computed memory of a step by kind, and the largest batch that fits",
        "memory_gb measured num_ranks",
        f"{PROBLEM}optim precision batch_size seed strategy {EXCHANGE} sync overlap bucket_mb "
        "scaling device",
        group="batch_size",
        default="64,128,256",
        alike="",
    ),
    "transfer": _of_device(
        "copies between host and device in trace=FILE: number, bytes, rate, overlap with kernels",
        "trace",
        "trace",
    ),
    "layers": _of_device(
        "times of each layer (forward, backward data, backward weights) and of the rest of a step",
        "rounds threads input_grad",
        ALONE,
        group="batch_size",
        default="32",
    ),
    "throughput": _of_device(
        "samples per second of training and inference by batch size, and the knee",
        "rounds threads",
        ALONE,
        group="batch_size",
        default="4,8,16,32,64,128",
    ),
    "roofline": _of_device(
        "operations per byte and speed of each layer, compared with this machine's peaks",
        "threads",
        f"{PROBLEM}precision tf32 batch_size channels_last device seed",
        alone=True,
    ),
}
