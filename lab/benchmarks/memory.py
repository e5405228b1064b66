"""Peak memory of a steady step by strategy, each in ranks of its own, beside what theory says.

The peak is of resident memory on CPUs, by Linux's own mark (VmHWM, which writing 5 to clear_refs
sets back), and of allocated memory on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.benchmarks import interleave
from lab.benchmarks.request import Request
from lab.benchmarks.step import CEILING, assembled
from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.exchange.auto import Auto
from lab.exchange.chunks import chunk_mb_over
from lab.exchange.grouping import MB
from lab.exchange.pipeline import LAG
from lab.exchange.tree import binomial_node
from lab.exchange.tree_double import in_order_node
from lab.settings.config import ConfigError
from lab.sync.gradsync import GradSync
from lab.training.assemble import Assembly, join
from lab.training.outcome import surroundings

NUM_STEPS = 7  # after the warm-up
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class Sizes:
    """What theory is a function of: numbers of float32 values, and the rank among N.

    Attributes:
        n: of the whole model.
        gathered: of buckets of several parameters, whose gradients are copied into a buffer.
        largest: of the largest bucket.
        backend: over which ranks talk; chunks go by it.
    """

    n: int
    gathered: int
    largest: int
    rank: int
    N: int
    backend: str = "gloo"


# Bytes beside weights, gradients and momentum, by class of what exchanges, which is the second
# argument; a new one is a line.
THEORY: dict[str, Callable[[Sizes, Any], float]] = {
    "NoSync": lambda s, e: 0,
    "NoExchange": lambda s, e: _peak(s),
    "AllReduce": lambda s, e: _peak(s, e.dtype.itemsize * s.n if not e.exact else 0),
    "Star": lambda s, e: _peak(s, 0 if s.rank else 4 * s.largest),
    "Tree": lambda s, e: _of_tree(s, e, len(binomial_node(s.rank, s.N).children)),
    "DoubleTree": lambda s, e: _peak(
        s, kept=sum(_chunks(s, s.largest / 2, e, _children(s, tree)) for tree in (0, 1))
    ),
    "Ring": lambda s, e: _peak(s, kept=_chunks(s, s.largest / s.N, e)),
    # Messages: what goes out, comes in, is answered, and all answers.
    "OneBit": lambda s, e: _peak(s, kept=4 * s.n * (1 + 1 / s.N) + s.n / 8 * (3 + 1 / s.N)),
    "Auto": lambda s, e: _of_chosen(s, e),
    "Int8": lambda s, e: _peak(s, s.n * (2 + 1 / s.N) + 4 * s.largest / s.N),
    **dict.fromkeys(("SignSGD", "PowerSGD"), lambda s, e: _peak(s, kept=4 * s.n)),
    # Of each value that is sent: int64 index; int32 index and value, one's own and everyone's.
    "TopK": lambda s, e: _peak(s, kept=4 * s.n + e.ratio * s.n * (8 + 8 + 8 * s.N)),
    "RandomK": lambda s, e: _peak(s, kept=4 * s.n + e.ratio * s.n * (8 + 4)),
    # The anchor, and the outer momentum.
    "LocalSync": lambda s, sync: _peak(s) + 4 * s.n * (1 + (sync.outer.defaults["momentum"] > 0)),
    # Ranks but the root hold no momentum.
    "RootUpdate": lambda s, sync: _of_exchange(s, sync.exchange) - (4 * s.n if s.rank else 0),
    # A second gradient, which is on its way meanwhile.
    "DoubleBuffer": lambda s, sync: (
        _of_exchange(s, sync.exchange) + (4 * s.n if sync.double_buffer else 0)
    ),
    "DDPSync": lambda s, e: 4 * s.n,  # its buckets, to which gradients are copied, and back
}


def _peak(sizes: Sizes, scratch: float = 0, kept: float = 0) -> float:
    """Gathered gradients leave their first place free: scratch adds what it needs beyond that."""
    return max(4 * sizes.gathered, scratch) + kept


def _chunks(sizes: Sizes, num_values: float, exchange: Any, num_children: int = 1) -> float:
    chunk_mb = chunk_mb_over(exchange.chunk_mb, sizes.backend)
    limit = chunk_mb * MB if chunk_mb else float("inf")
    return LAG * num_children * min(4 * num_values, limit)


def _of_exchange(sizes: Sizes, exchange: Any) -> float:
    return THEORY[type(exchange).__name__](sizes, exchange)


def _of_chosen(sizes: Sizes, auto: Auto) -> float:
    chosen = {choice["chosen"] for choice in auto.choices()}
    ways = [way for way in (auto.compressed, auto.plain) if type(way).__name__ in chosen]
    return max((_of_exchange(sizes, way) for way in ways), default=float("nan"))


def _of_tree(sizes: Sizes, tree: Any, num_children: int) -> float:
    if chunk_mb_over(tree.chunk_mb, sizes.backend) is None:
        return _peak(sizes, 4 * sizes.largest if num_children else 0)
    return _peak(sizes, kept=_chunks(sizes, sizes.largest, tree, num_children))


def _children(sizes: Sizes, tree: int) -> int:
    return len(in_order_node(sizes.rank, sizes.N, tree).children)


def measure(request: Request) -> dict[str, Any] | None:
    """Peaks of the one strategy that these ranks are for, on rank 0.

    Raises:
        ConfigError: several strategies, or peaks that cannot be read here.
    """
    if len(request.variants) > 1:
        raise ConfigError(
            "memory: each strategy needs fresh ranks; run python -m lab.bench memory world_size=N"
        )
    config = request.variants[0].config
    try:
        world = join(config)
        _check_readable(world.device)
        with assembled(config, world) as part:
            peaks = _peaks(part, config.warmup_steps, world)
            hook = config.sync.get("hook", "none")
            theory = theory_bytes(part.trainer.sync, hook, world)
        everyones = world.gather(torch.tensor([theory], dtype=torch.float64))[:, 0].tolist()
        row = {
            "name": request.variants[0].label,
            "peak_bytes": [interleave.middle(own) for own in peaks.numpy()],
            "extra_theory_bytes": [None if np.isnan(each) else each for each in everyones],
            "num_steps": peaks.shape[1],
            **part.sizes,
        }
        result = {"rows": [row], "backend": world.comm.backend, **surroundings(world, config)}
        return {**result, "world_size": world.size} if world.rank == 0 else None
    finally:
        worlds.stop()


def combine(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of those of all strategies: what each adds to `none`, measured and in theory."""
    rows = [result["rows"][0] for result in results]
    (ceiling,) = (row for row in rows if row["name"] == CEILING)
    return {**results[0], "rows": [row | _compare(row, ceiling) for row in rows]}


def _compare(row: dict[str, Any], ceiling: dict[str, Any]) -> dict[str, Any]:
    """Of the rank with the highest peak; what the model itself needs is measured by `none`."""
    peaks = [peak["median"] for peak in row["peak_bytes"]]
    rank = int(np.argmax(peaks))
    base = ceiling["peak_bytes"][rank]["median"] - ceiling["extra_theory_bytes"][rank]
    extra = row["extra_theory_bytes"][rank]
    return {
        "rank": rank,
        "total_bytes": peaks[rank],
        "extra_bytes": peaks[rank] - base,
        "theory_bytes": None if extra is None else base + extra,
        "of_theory": None if extra is None else peaks[rank] / (base + extra),
    }


def theory_bytes(sync: Any, hook: str, world: World) -> float:
    """What this rank needs beside weights, gradients and momentum; NaN where nobody has said.

    Args:
        sync: GradSync, or an outside reference.
        hook: DDP's communication hook, "none" for all others.
    """
    own = type(sync) is GradSync
    planned = sync.buckets if isinstance(sync, GradSync) else []
    buckets = [bucket.parameters.values() for bucket in planned]
    counts = [sum(p.numel() for p in parameters) for parameters in buckets]
    sizes = Sizes(
        n=sum(p.numel() for p in sync.module.parameters() if p.requires_grad),
        gathered=sum(n for n, of in zip(counts, buckets, strict=True) if len(of) > 1),
        largest=max(counts, default=0),
        rank=world.rank,
        N=world.size,
        backend=world.comm.backend,
    )
    name = type(sync.exchange if own else sync).__name__
    formula = THEORY.get(name if hook == "none" else f"{name} {hook}")
    return formula(sizes, sync.exchange if own else sync) if formula else float("nan")


def _peaks(part: Assembly, warmup_steps: int, world: World) -> torch.Tensor:
    """Bytes at the peak of each step after the warm-up: [ranks, steps]."""
    loop = part.trainer.steps()
    for _ in islice(loop, warmup_steps):
        pass
    own = []
    for _ in range(NUM_STEPS):
        world.barrier()
        reset_peak(world.device)
        if next(loop, None) is None:
            raise ConfigError("steps: too few: none is left after warmup_steps")
        own.append(peak_bytes(world.device))
    return world.gather(torch.tensor(own))


def _check_readable(device: torch.device) -> None:
    try:
        reset_peak(device)
    except OSError as error:
        raise ConfigError(
            f"device={device.type}: peaks of resident memory are read from {CLEAR} and {STATUS}, "
            f"as Linux has them: {error.strerror}; device=cuda needs neither"
        ) from None


def reset_peak(device: torch.device) -> None:
    """Let the peak start again at what is in use now.

    Raises:
        OSError: this system has no such mark.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The highest use since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
