"""Peak memory of a steady step by strategy, each in fresh ranks, and in theory.

The optimizer's state is counted from its tensors, after the last step.

The peak is of resident memory on CPUs, by Linux's own mark (VmHWM, which writing 5 to clear_refs
resets), and of allocated memory on GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from lab.benchmarks import interleave
from lab.benchmarks.harness import on_ranks
from lab.benchmarks.present import about, machine, ranks_of, tabulate
from lab.benchmarks.request import Request
from lab.benchmarks.step import CEILING
from lab.distributed.replicas import local
from lab.distributed.world import World
from lab.draw.chart import Chart
from lab.draw.looks import SKY
from lab.draw.plots import bars
from lab.exchange.cost import Sizes
from lab.measure.memory import CLEAR, STATUS, peak_bytes, reset_peak
from lab.measure.statistics import least_warmup
from lab.settings.config import ConfigError
from lab.simulate.request import plain
from lab.simulate.strategy import sync_bytes
from lab.sync.gradsync import GradSync
from lab.training.assemble import assembled
from lab.training.trainer import Trainer

NUM_STEPS = 7  # after the warm-up
MB = 1e-6


@on_ranks
def measure(request: Request, world: World) -> dict[str, Any]:
    """Measure the peaks of one strategy.

    Raises:
        ConfigError: there are several strategies, or peaks cannot be read here.
    """
    if len(request.variants) > 1:
        raise ConfigError(
            "memory: each strategy needs fresh ranks; run python -m lab.bench memory world_size=N"
        )
    config = request.variants[0].config
    _check_readable(world.device)
    with assembled(config, world) as part:
        peaks = _peaks(part.trainer, world)
        theory = sync_bytes(sizes_of(part.trainer.sync, world), plain(config))
        state = state_bytes(part.trainer.optimizer)
    own = torch.tensor([theory, state], dtype=torch.float64)
    everyones, states = world.gather(own).T.tolist()
    row = {
        "name": request.variants[0].label,
        "peak_bytes": [interleave.middle(of_rank) for of_rank in peaks.numpy()],
        "extra_theory_bytes": [None if np.isnan(each) else each for each in everyones],
        "optimizer_bytes": states,
        "num_steps": peaks.shape[1],
        **part.sizes,
    }
    return {"rows": [row]}


def combine(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the results of all strategies: what each adds to `none`, measured and in theory."""
    rows = [result["rows"][0] for result in results]
    (ceiling,) = (row for row in rows if row["name"] == CEILING)
    return {**results[0], "rows": [row | _compare(row, ceiling) for row in rows]}


def _compare(row: dict[str, Any], ceiling: dict[str, Any]) -> dict[str, Any]:
    """Compare the rank with the highest peak with theory; `none` measures the model's own part."""
    peaks = [peak["median"] for peak in row["peak_bytes"]]
    rank = int(np.argmax(peaks))
    base = ceiling["peak_bytes"][rank]["median"] - ceiling["extra_theory_bytes"][rank]
    extra = row["extra_theory_bytes"][rank]
    return {
        "rank": rank,
        "optimizer_share": _share(max(row["optimizer_bytes"]), max(ceiling["optimizer_bytes"])),
        "total_bytes": peaks[rank],
        "extra_bytes": peaks[rank] - base,
        "theory_bytes": None if extra is None else base + extra,
        "of_theory": None if extra is None else peaks[rank] / (base + extra),
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of this rank's tensors in an optimizer's state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(local(value).nbytes for value in values if isinstance(value, torch.Tensor))


def sizes_of(sync: Any, world: World) -> Sizes:
    """Collect the sizes of a sync's buckets on this rank.

    Args:
        sync: GradSync, or a library's sync, whose buckets are unknown.
    """
    planned = sync.buckets if isinstance(sync, GradSync) else []
    buckets = [bucket.parameters.values() for bucket in planned]
    counts = [sum(p.numel() for p in parameters) for parameters in buckets]
    choices = sync.exchange.choices() if isinstance(sync, GradSync) else []
    return Sizes(
        n=sum(p.numel() for p in sync.module.parameters() if p.requires_grad),
        gathered=sum(n for n, of in zip(counts, buckets, strict=True) if len(of) > 1),
        largest=max(counts, default=0),
        rank=world.rank,
        N=world.size,
        backend=world.comm.backend,
        local=max(map(len, world.comm.nodes)),
        chosen=frozenset(choice["chosen"] for choice in choices if "chosen" in choice),
    )


def _peaks(trainer: Trainer, world: World) -> torch.Tensor:
    """Measure the peak bytes of each step after the warm-up and any trials: [ranks, steps]."""
    loop, warmup = trainer.steps(), least_warmup(trainer.config.warmup_steps)
    while trainer.progress.step < warmup or trainer.sync.settled_at is None:
        if next(loop, None) is None:
            break
    peaks = []
    for _ in range(NUM_STEPS):
        world.barrier()
        reset_peak(world.device)
        if next(loop, None) is None:
            raise ConfigError(
                f"steps={trainer.total_steps}: too few: {NUM_STEPS} are measured after "
                "warmup_steps, and after those in which a strategy tries others"
            )
        peaks.append(peak_bytes(world.device))
    return world.gather(torch.tensor(peaks))


def _check_readable(device: torch.device) -> None:
    try:
        reset_peak(device)
    except OSError as error:
        raise ConfigError(
            f"device={device.type}: peaks of resident memory are read from {CLEAR} and {STATUS}, "
            f"as Linux has them: {error.strerror}; device=cuda needs neither"
        ) from None


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each strategy."""

    def megabytes(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{MB * value:.{digits}f}"

    def of_theory(row: dict[str, Any]) -> str:
        return "-" if row["of_theory"] is None else f"{row['of_theory']:.3f}"

    def share(row: dict[str, Any]) -> str:
        return "-" if row.get("optimizer_share") is None else f"{row['optimizer_share']:.4f}"

    def state(row: dict[str, Any]) -> str:  # results of earlier versions do not have it
        return megabytes(max(row.get("optimizer_bytes", []), default=None), 2)

    return tabulate(
        result["rows"],
        {
            "": lambda row: row["name"],
            "peak (MB)": lambda row: megabytes(row["total_bytes"]),
            "mad": lambda row: megabytes(row["peak_bytes"][row["rank"]]["mad"]),
            "theory (MB)": lambda row: megabytes(row["theory_bytes"]),
            "peak/theory": of_theory,
            "extra (MB)": lambda row: megabytes(row["extra_bytes"]),
            "extra, theory (MB)": lambda row: megabytes(row["extra_theory_bytes"][row["rank"]]),
            "rank": lambda row: str(row["rank"]),
            "optimizer (MB)": state,
            "share of none": share,
        },
    )


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    parameters = result["rows"][0]["num_parameters"]
    return [
        f"medians of {result['rows'][0]['num_steps']} steady steps of the rank with the highest "
        f"peak, on {result['world_size']} ranks, each strategy in fresh processes",
        f"extra: besides what training {parameters / 1e6:.1f} M parameters needs without exchange "
        "(measured: the peak of none less its buffers)",
        "optimizer: tensors of its state, on the rank that has most",
    ]


def chart(result: dict[str, Any]) -> Chart:
    """Draw a bar for each strategy's peak, and a mark where theory puts it."""
    rows = result["rows"]
    data = pd.DataFrame(
        {
            "name": row["name"],
            "part": "measured",
            "value": MB * row["total_bytes"],
            "mark": None if row["theory_bytes"] is None else MB * row["theory_bytes"],
            "text": f"{MB * row['total_bytes']:.0f}"
            + ("" if row["of_theory"] is None else f" ({row['of_theory']:.2f} × theory)"),
        }
        for row in rows
    )
    body, width = bars(data, "peak of a step, busiest rank (MB)", {"measured": SKY}, marks="theory")
    known = [row["of_theory"] for row in rows if row["of_theory"] is not None]
    message = f"Peak memory on {ranks_of(result)}"
    if known:
        message += f" is {' to '.join(dict.fromkeys((f'{min(known):.2f}', f'{max(known):.2f}')))}"
        message += " of theory"
    sample = f"medians of {rows[0]['num_steps']} steady steps"
    return Chart("memory", message, [f"{machine(result)} · {sample}", *about(result)], body, width)
