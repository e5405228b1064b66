"""Studies of made-up runs, as large as those that people share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pandas as pd

from lab.measure import Span
from lab.record.schema import read_record
from lab.record.steps import STEPS
from lab.record.trace import TIMELINE, write_trace
from tests.support.records import leave, make_record

STRATEGIES = {"none": 0.0, "allreduce": 0.5, "tree": 0.8, "overlap": 0.2, "onebit": 0.1}
SIZES, BATCHES, REPEATS = (1, 2, 4), (64, 128), 5
NOISE = 0.02
# Names that attack a page, a terminal or a spreadsheet.
HOSTILE = (
    *("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>"),
    *("\"' onmouseover='alert(1)", "{{ 7 * 7 }}", "${alert(1)}", "]]><!--"),
    *("\u202egnp.exe", "\x00\x1b[31m", "=HYPERLINK(1)", "x" * 10_000),
)


def make_study(
    folder: Path,
    num_cells: int = 150,
    seed: int = 0,
    faster: float = 1.0,
    name: str = "made",
    batches: Sequence[int] = BATCHES,
) -> Path:
    """Leave the records of a study, with learning curves and the timeline of one run.

    Args:
        num_cells: as many repeats are made as it takes, at least REPEATS of the usual batches.
        faster: divides all steps of several ranks.
    """
    rng = np.random.default_rng(seed)
    repeats = -(-num_cells // (len(STRATEGIES) * len(SIZES) * len(batches)))
    repeats = max(repeats, REPEATS if batches == BATCHES else 1)
    environment = {"cpu": "made", "num_cores": 4, "memory_gib": 8, "torch": "2.13"}
    cells = product(STRATEGIES.items(), SIZES, batches, range(repeats))
    for (strategy, exposed), size, batch, repeat in cells:
        alone = 1e-3 * batch / size
        added = 0.02 * exposed if size > 1 else 0.0
        seconds = (alone + added) / (faster if size > 1 else 1.0)
        seconds *= float(np.exp(rng.normal(0, NOISE)))
        cell = f"{strategy}-n{size}-b{batch}-r{repeat}"
        record = make_record(
            strategy, size, seconds,
            batch_size=batch, study=name, cell=cell, repeat=repeat,
            started_at=f"2026-11-0{1 + repeat % 9}T10:00:00+00:00",
            payload_bytes_per_step=[int(1e6 * exposed * 10 * (size > 1))] * size,
            num_parameters=2_500_000, final={"loss": 0.3, "accuracy": 0.9},
            environment=environment,
        )  # fmt: skip
        leave(folder / cell, record)
    write_timeline(folder / f"overlap-n{SIZES[-1]}-b64-r0", SIZES[-1])
    write_curve(folder / f"overlap-n{SIZES[-1]}-b128-r0", SIZES[-1])
    return folder


def name_by(folder: Path, names: Sequence[str]) -> None:
    """Put names wherever a study holds words of others, errors and strategies among them."""
    for at, name in enumerate(names):
        path = folder / f"tree-n4-b64-r{at % 5}" / "record.json"
        record = read_record(path)
        record.environment = {**record.environment, "cpu": name, name: name}
        record.final[name] = 0.5
        record.idle = [*record.idle, name]
        if at >= 5:
            record.end("failed", name, name)
        record.write(path)
        strategy = ("onebit", "overlap")[at // 5]
        path = folder / f"{strategy}-n4-b128-r{at % 5}" / "record.json"
        replace(read_record(path), strategy=name).write(path)


def write_timeline(cell: Path, num_ranks: int, num_steps: int = 5, num_buckets: int = 8) -> None:
    """Write a timeline of some steps, each with an exchange for each bucket, a layer's."""
    spans = list[Span]()
    ends = {"": 0.0, "data": 0.005, "forward": 0.03, "backward": 0.08}
    ends |= {"wait": 0.09, "optimizer": 0.1}
    for rank, step in product(range(num_ranks), range(num_steps)):
        begin = 0.1 * step
        spans.append(Span(rank, "step", f"step {step}", begin, begin + 0.1))
        for (_, start), (row, end) in pairwise(ends.items()):
            spans.append(Span(rank, row, row, begin + start, begin + end))
        for layer in range(num_buckets):
            forward = begin + 0.005 + 0.025 / num_buckets * layer
            backward = begin + 0.08 - 0.05 / num_buckets * (layer + 1)
            ends_s = forward + 0.025 / num_buckets, backward + 0.05 / num_buckets
            spans.append(Span(rank, "layer", f"layer{layer}", forward, ends_s[0]))
            spans.append(Span(rank, "layer", f"layer{layer}", backward, ends_s[1]))
        for bucket in range(num_buckets):
            start = begin + 0.03 + 0.006 * bucket
            name = f"layer{bucket}.weight layer{bucket}.bias"
            spans.append(Span(rank, "exchange", name, start, start + 0.01))
            spans.append(Span(rank, "codec", name, start, start + 0.002))
    write_trace(cell / TIMELINE, spans, {"strategy": "overlap", "world_size": num_ranks})


def write_curve(cell: Path, num_ranks: int, num_steps: int = 200) -> None:
    """Write the losses of a run's steps."""
    steps = np.arange(num_steps)
    table = pd.DataFrame({"rank": 0, "step": steps, "step_s": 0.05, "timed": True})
    table["loss"], table["end_s"] = 2.3 * np.exp(-steps / 60) + 0.1, 0.05 * (steps + 1)
    pd.concat([table.assign(rank=rank) for rank in range(num_ranks)]).to_parquet(cell / STEPS)
