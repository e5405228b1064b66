"""Peak memory of a steady step by strategy, each in fresh ranks, and in theory.

The optimizer's state is counted from its tensors, after the last step; lab.measure.memory has the
peak.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from lab.benchmarks import present
from lab.benchmarks.harness import middle, on_ranks
from lab.benchmarks.request import BenchRequest
from lab.benchmarks.step import BASELINE, warm_up
from lab.distributed.replicas import local
from lab.distributed.world import World
from lab.draw.chart import SKY
from lab.draw.plots import bars
from lab.exchange.cost import Sizes, of_buckets
from lab.exchange.layout import travel_shape
from lab.measure.memory import CLEAR, STATUS, peak_bytes, reset_peak
from lab.settings.config import ConfigError
from lab.simulate.predict import plain
from lab.simulate.strategy import sync_bytes
from lab.sync.gradsync import GradSync
from lab.training.assemble import assembled
from lab.training.trainer import Trainer

NUM_STEPS = 7  # after the warm-up
MB = 1e-6


@on_ranks
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    if len(request.variants) > 1:
        raise ConfigError(
            "memory: lab.bench must start new ranks for each strategy; leave the launcher out, as "
            "in python -m lab.bench memory world_size=2"
        )
    config = request.config
    try:
        reset_peak(world.device)
    except OSError as error:
        raise ConfigError(
            f"device={world.device.type}: cannot measure peak resident memory ({error.strerror}); "
            f"this needs {CLEAR} and {STATUS}, which exist only on Linux; device=cuda needs "
            "neither file"
        ) from None
    with assembled(config, world) as part:
        peaks = _peaks(part.trainer, world)
        theory = sync_bytes(sizes_of(part.trainer.sync, world), plain(config))
        state = state_bytes(part.trainer.optimizer)
    own = torch.tensor([theory, state], dtype=torch.float64)
    everyones, states = world.gather(own).T.tolist()
    row = {
        "name": request.variants[0].label,
        "peak_bytes": [middle(of_rank) for of_rank in peaks.numpy()],
        "extra_theory_bytes": [None if np.isnan(each) else each for each in everyones],
        "optimizer_bytes": states,
        "num_steps": peaks.shape[1],
        **part.sizes,
    }
    return {"rows": [row]}


def combine(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the results of all strategies: what each adds to `none`, measured and in theory."""
    rows = [result["rows"][0] for result in results]
    (baseline,) = (row for row in rows if row["name"] == BASELINE)
    return {**results[0], "rows": [row | _compare(row, baseline) for row in rows]}


def _compare(row: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Compare the rank with the highest peak with theory; `none` measures the model's own part."""
    peaks = [peak["median"] for peak in row["peak_bytes"]]
    rank = int(np.argmax(peaks))
    base = baseline["peak_bytes"][rank]["median"] - baseline["extra_theory_bytes"][rank]
    extra = row["extra_theory_bytes"][rank]
    state, plain = (max(each["optimizer_bytes"]) for each in (row, baseline))
    return {
        "rank": rank,
        "optimizer_share": state / plain if plain else None,
        "total_bytes": peaks[rank],
        "extra_bytes": peaks[rank] - base,
        "theory_bytes": None if extra is None else base + extra,
        "of_theory": None if extra is None else peaks[rank] / (base + extra),
    }


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
    gathered, largest = of_buckets([bucket.shapes for bucket in planned])
    choices = sync.exchange.choices() if isinstance(sync, GradSync) else []
    return Sizes(
        n=sum(travel_shape(p).numel() for p in sync.module.parameters() if p.requires_grad),
        gathered=gathered,
        largest=largest,
        rank=world.rank,
        N=world.size,
        backend=world.comm.backend,
        local=max(map(len, world.comm.nodes)),
        chosen=frozenset(choice["chosen"] for choice in choices if "chosen" in choice),
    )


def _peaks(trainer: Trainer, world: World) -> torch.Tensor:
    """Measure the peak bytes of each step after the warm-up and any trials: [ranks, steps]."""
    loop = trainer.steps()
    warm_up(trainer, loop)
    peaks = []
    for _ in range(NUM_STEPS):
        world.barrier()
        reset_peak(world.device)
        if next(loop, None) is None:
            raise ConfigError(
                f"steps={trainer.total_steps}: too few: {NUM_STEPS} steps are measured, "
                "after warmup_steps and any steps in which a strategy tries other exchanges"
            )
        peaks.append(peak_bytes(world.device))
    return world.gather(torch.tensor(peaks))


COLUMNS: dict[str, present.Column] = {
    "": present.text("name"),
    "peak (MB)": present.number("total_bytes", MB),
    "mad": lambda row: present.decimals(row["peak_bytes"][row["rank"]]["mad"], MB),
    "theory (MB)": present.number("theory_bytes", MB),
    "peak/theory": present.number("of_theory", digits=3),
    "extra (MB)": present.number("extra_bytes", MB),
    "extra, theory (MB)": lambda row: present.decimals(row["extra_theory_bytes"][row["rank"]], MB),
    "rank": present.text("rank"),
    # Results of earlier versions do not have it.
    "optimizer (MB)": lambda row: present.decimals(
        max(row.get("optimizer_bytes", []), default=None), MB, 2
    ),
    "share of none": present.number("optimizer_share", digits=4),
}


def notes(result: dict[str, Any]) -> list[str]:
    parameters = result["rows"][0]["num_parameters"]
    return [
        f"medians of {result['rows'][0]['num_steps']} steady steps of the rank with the highest "
        f"peak, on {result['world_size']} ranks, each strategy in fresh processes",
        f"extra: memory beyond what training {parameters / 1e6:.1f} M parameters needs without an "
        "exchange (measured: the peak with strategy=none, minus its buffers)",
        "optimizer: tensors of the optimizer's state, on the rank with the most",
    ]


def chart(result: dict[str, Any]) -> present.Drawn:
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
    known = [row["of_theory"] for row in rows if row["of_theory"] is not None]
    of_theory = f" is {present.span(known, '.2f')} × theory" if known else ""
    sample = f"medians of {rows[0]['num_steps']} steady steps"
    drawn = bars(data, "peak of a step, busiest rank (MB)", {"measured": SKY}, marks="theory")
    message = f"Peak memory on {present.ranks_of(result)}{of_theory}"
    return message, [f"{present.machine(result)} · {sample}"], drawn
