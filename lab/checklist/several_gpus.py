"""Items for several GPUs. Ranges are estimates; none was measured beforehand."""

from __future__ import annotations

from collections.abc import Iterator

from lab.checklist.figures import (
    Read,
    efficiency,
    ended,
    is_recorded,
    less,
    ratio,
    recorded,
    row,
    says,
    seen,
    share_within,
    total,
)
from lab.checklist.item import RUNS, STUDY, Command, Figure, Item, Machine, Results
from lab.checklist.one_gpu import ALEXNET, bench, tests, train

SCALING = "first_hour_scaling"  # the study of item 13
STEPS = {"step_all_256": ("a", "batch_size=256"), "step_all_32": ("b", "batch_size=32")}
STOPPED_AFTER_S = 40.0


def several_gpus(machine: Machine) -> Iterator[Item]:
    """Make the checklist's items 10 to 15, and the tests that need several GPUs."""
    yield tests("3f", "tests_several", ("tests/gpu/test_several_gpus.py",), "a GPU each", 2)
    yield _main_job(machine)
    yield from (_collective(machine, part) for part in ("a", "b"))
    yield from (_steps(machine, name, *about) for name, about in STEPS.items())
    yield _scaling(machine)
    yield _timeline(machine)
    yield _lost_rank(machine)
    yield _algorithm(machine)


def _has_nvlink(machine: Machine) -> bool:
    """Tell whether the ranges for eight GPUs behind NVLink 4 switches hold for this machine."""
    return machine.num_gpus == 8 and machine.has("H100", "H200", "H800", "H20")


def _main_job(machine: Machine) -> Item:
    sizes = sorted({2, machine.num_gpus})
    weak = ("strategy=onebit", "steps=400", "scaling=weak", "batch_size=256")
    commands = tuple(
        Command(f"all_{n}", train(f"all_{n}", *weak), num_ranks=n, counts_processes=True)
        for n in sizes
    )

    def linked(results: Results) -> float:
        """Count the pairs of GPUs that nvidia-smi calls NVLink (NV18)."""
        links = results.json("hardware")["environment"]["gpu_links"].splitlines()
        lines = [line.split() for line in links if line.startswith("GPU")]
        return sum(word.startswith("NV") for line in lines for word in line[1:]) / 2

    pairs = machine.num_gpus * (machine.num_gpus - 1) / 2
    figures = [
        Figure("pairs joined by NVLink", "", linked, pairs, pairs, "all", _has_nvlink(machine))
    ]
    for n in sizes:
        cell = f"all_{n}"
        done = is_recorded(cell, status="done", backend="nccl", device="cuda")
        hashed = is_recorded(cell, replica_hash=None)
        one = seen(cell, "on_one_gpu")
        figures += [
            Figure(f"done on {n}, over NCCL", "", done, 1, 1, "the main job"),
            Figure(f"without a replica hash on {n}", "", hashed, 0, 0, "replicas are equal"),
            Figure(f"processes on a GPU, of {n}", "", one, 1, 1, "no rank touches another's GPU"),
        ]
    return Item("10", "main job on several GPUs", commands, tuple(figures), 2)


def _collective(machine: Machine, part: str) -> Item:
    name, without = f"collective_{part}", part == "b"
    settings = ("exchange=ring,tree,tree_double,bf16", "sizes=[256MiB,1GiB]", "rounds=20")
    words = bench(machine, name, "collective", *settings, f"world_size={machine.num_gpus}")
    command = Command(name, words, environment={"NCCL_NVLS_ENABLE": "0"} if without else {})

    def busbw(algorithm: str) -> Read:
        return row(name, "busbw_gb_per_s", algorithm=algorithm, size_bytes=2**30)

    low, high = (300, 400) if without else (350, 480)
    link, known = "450 GB/s a direction, more by sums in the switch", _has_nvlink(machine)
    own = "each chunk is queued by the host"
    figures = (
        Figure("wrong values", "", total(name, "wrong"), 0, 0, "means of whole numbers are exact"),
        Figure("all-reduce of 1 GiB", "GB/s", busbw("allreduce"), low, high, link, known),
        *(
            Figure(f"{each} / all-reduce", "", ratio(busbw(each), busbw("allreduce")), 0.05, 1, own)
            for each in ("ring", "tree", "tree_double")
        ),
    )
    title = "collectives" + (" without NVLS" if without else "")
    return Item(f"11{part}", title, (command,), figures, 2)


def _steps(machine: Machine, name: str, part: str, batch: str) -> Item:
    settings = ("strategy=none,overlap,onebit,bf16,ddp", *ALEXNET, "scaling=weak", batch)
    ranks = ("steps=120", f"world_size={machine.num_gpus}")
    command = Command(name, bench(machine, name, "step", *settings, *ranks))

    def exposed_ms(strategy: str) -> Read:
        return row(name, "exposed_exchange_s.median", 1e3, name=strategy)

    to_ddp = row(name, "exposed_to_ddp.median", name="overlap")
    onebit_ms = less(name, "step_s.median", 1e3, "onebit", "none")
    last, known = "the last bucket, 247 MB in all", _has_nvlink(machine)
    figures = (
        Figure("exposed by ddp", "ms", exposed_ms("ddp"), 0.1, 0.5, last, known),
        Figure("exposed by overlap", "ms", exposed_ms("overlap"), 0.1, 0.5, last, known),
        Figure("overlap's / ddp's", "", to_ddp, 0.8, 1.5, "both send the same", known),
        Figure("onebit - none", "ms", onebit_ms, 0.3, 3, "codec, and 24 launches at most", known),
    )
    return Item(f"12{part}", f"steps of AlexNet, {batch} a rank", (command,), figures, 2)


def _scaling(machine: Machine) -> Item:
    sizes = [n for n in (1, 2, 4, 8) if n <= machine.num_gpus]
    most = sizes[-1]
    settings = ("strategy=none,overlap,onebit,ddp", f"world_size={','.join(map(str, sizes))}")
    runs = ("scaling=weak", "batch_size=256", *ALEXNET, "steps=120", "repeats=1")
    commands = (
        Command("sweep", ("-m", "lab.sweep", f"study={SCALING}", *settings, *runs)),
        Command("plot", ("-m", "lab.plot", f"{RUNS}/{SCALING}")),
    )
    figures = tuple(
        Figure(f"{each} on {most}", "", efficiency(SCALING, each, most), low, 1.02, why)
        for each, low, why in (
            ("overlap", 0.95, "0.5 ms of a step are exposed"),
            ("ddp", 0.95, "as overlap"),
            ("onebit", 0.8, "3 ms are"),
        )
    )
    return Item("13", "weak scaling; again where the time ends it", commands, figures, 2)


def _timeline(machine: Machine) -> Item:
    settings = ("strategy=overlap", "measure=breakdown", "scaling=weak", "batch_size=256")
    words = train("timeline", *settings, *ALEXNET, "steps=40")
    commands = (
        Command("timeline", words, num_ranks=machine.num_gpus),
        Command("draw", ("-m", "lab.plot", f"{RUNS}/{STUDY}/timeline")),
    )
    hidden = share_within("timeline", "exchange", "backward")
    waited = recorded("timeline", "phases_s.exchange", 1e3)
    fast = _has_nvlink(machine)
    figures = (
        Figure("exchange within backward", "", hidden, 0.7, 1, "all buckets but the last", fast),
        Figure("wait after backward", "ms", waited, 0, 0.5, "the last bucket", fast),
    )
    return Item("14", "timeline of overlap", commands, figures, 2)


def _lost_rank(machine: Machine) -> Item:
    settings = ("strategy=overlap", "scaling=weak", "steps=10000000", "exchange_timeout_s=30")
    words = train("hang", *settings)
    ranks = machine.num_gpus
    command = Command("hang", words, ranks, code=1, stop_rank_after_s=STOPPED_AFTER_S)
    says_what = says("hang", r"exchange_timeout_s=30: rank \d+ waits in ")

    def ended_after(results: Results) -> float:
        return ended("hang", "seconds")(results) - STOPPED_AFTER_S

    last = "30 s, and 30 more until torchrun kills what is stopped"
    figures = (
        Figure("says which exchange hangs", "", says_what, 1, 1, "the watchdog"),
        Figure("says who is lost", "", says("hang", "rank 1 is lost"), 1, 1, "its roll call"),
        Figure("end after the stop", "s", ended_after, 30, 90, last),
        Figure("processes left", "", ended("hang", "num_left"), 0, 0, "GPUs are free again"),
    )
    return Item("15a", "a rank is stopped (SIGSTOP)", (command,), figures, 2)


def _algorithm(machine: Machine) -> Item:
    words = train("tree", "strategy=overlap", "steps=40", "scaling=weak", "comm.nccl_algo=Tree")
    done = is_recorded("tree", status="done", backend="nccl")
    figure = Figure("done", "", done, 1, 1, "broadcasts take another algorithm")
    command = Command("tree", words, num_ranks=machine.num_gpus)
    return Item("15b", "NCCL's tree", (command,), (figure,), 2)
