"""Show what a sweep would run, and what it would take; start nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lab.study.cells import already, recorded
from lab.study.estimate import Measured, measured_in, most_similar
from lab.study.grid import Study

UNKNOWN = "unknown: no cell of the same model, data and steps is done"


def show(study: Study) -> None:
    """Print each cell, done or to run, and the sum of minutes and bytes.

    Raises:
        ConfigError: a file in the study's folder is no record.
    """
    for line in lines(study):
        print(line)


def lines(study: Study) -> Iterator[str]:
    """Describe the cells in order, then their sum."""
    root = Path(study.runs_dir) / study.name
    measured = measured_in(root)
    likes = list[Measured | None]()
    for number, cell in enumerate(study.cells, start=1):
        record = recorded(root, cell, study.retries)
        if record is None:
            likes.append(most_similar(cell, measured))
        outcome = already(record) if record else f"would run: {_like(likes[-1])}"
        yield f"[{number}/{len(study.cells)}] {cell.name}: {outcome}"
    yield f"would run {len(likes)} of {len(study.cells)} cells: {_sum(likes)}"


def _like(like: Measured | None) -> str:
    if like is None:
        return UNKNOWN
    return f"{needs(like.duration_s, like.num_bytes)}, as {like.record.cell}"


def _sum(likes: list[Measured | None]) -> str:
    known = [like for like in likes if like]
    if not likes:
        return "nothing is missing"
    if not known:
        return UNKNOWN
    total = needs(sum(k.duration_s for k in known), sum(k.num_bytes for k in known))
    rest = len(likes) - len(known)
    return f"{total}, start-up not counted" + (f"; {rest} of them {UNKNOWN}" if rest else "")


def needs(seconds: float, num_bytes: int) -> str:
    """Describe a time and a size on disk, in minutes and MB."""
    return f"about {_short(seconds / 60)} min, {_short(num_bytes / 1e6)} MB"


def _short(value: float) -> str:
    return f"{value:.1g}" if value < 1 else f"{value:.1f}".removesuffix(".0")
