"""Records for tests, made in the same way as a run's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.record.schema import Record, Scaling, StepSeconds


def make_record(
    strategy: str,
    world_size: int,
    seconds: float | None,
    *,
    batch_size: int = 64,
    scaling: Scaling = "strong",
    **changes: Any,
) -> Record:
    """Make the record of a run that is done, or has failed if `seconds` of a step is None.

    Args:
        batch_size: as a study sets it: global if scaling is strong, per rank if weak.
        changes: other keys of the record.
    """
    samples = batch_size * world_size if scaling == "weak" else batch_size
    record = Record(
        status="failed" if seconds is None else "done",
        study="demo",
        cell=f"{strategy}-n{world_size}",
        repeat=0,
        strategy=strategy,
        variant={},
        world_size=world_size,
        batch_size=samples,
        per_rank_batch_size=samples // world_size,
        scaling=scaling,
        unit="image",
        model="AlexNet",
        data="Synthetic",
        precision="fp32",
        device="cpu",
    )
    if seconds is not None:
        record.step_s = StepSeconds(median=seconds, p95=seconds, mad=0.001)
        record.samples_per_s = record.wall_samples_per_s = samples / seconds
    return replace(record, **changes)


def leave(folder: Path, record: Record) -> None:
    """Write the record into its run's directory, which is created."""
    folder.mkdir(parents=True)
    record.write(folder / "record.json")
