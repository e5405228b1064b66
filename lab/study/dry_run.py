"""Show what a sweep would run, and what it would take; start nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.record.schema import Record, read_record
from lab.settings.names import root_of
from lab.study.grid import Cell, Study
from lab.study.launch import already, recorded

UNKNOWN = "unknown: no cell of the same model, data and steps is done"
# Settings that say what is computed and for how long; in these, a similar cell has to be equal.
OF_WORK = (
    *("model", "profile", "data", "task", "steps", "epochs", "accumulate"),
    *("warmup_steps", "eval_every", "checkpoint_every"),
)


def lines(study: Study) -> Iterator[str]:
    """Describe the cells in order, done or to run, then the sum of minutes and bytes.

    Raises:
        ConfigError: a file in the study's folder is no record.
    """
    root = Path(study.runs_dir) / study.name
    measured = measured_in(root)
    likes = list[Measured | None]()
    for number, cell in enumerate(study.cells, start=1):
        record = recorded(root, cell, study.retries)
        if record is None:
            likes.append(most_similar(cell, measured))
        outcome = already(record) if record else f"would run: {likes[-1] or UNKNOWN}"
        yield f"[{number}/{len(study.cells)}] {cell.name}: {outcome}"
    yield f"would run {len(likes)} of {len(study.cells)} cells: {_sum(likes)}"


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


@dataclass(frozen=True)
class Measured:
    """A cell that is done, and the bytes of its directory."""

    record: Record
    num_bytes: int

    @property
    def duration_s(self) -> float:
        """Seconds from the ranks' start to the record."""
        return self.record.duration_s or 0.0

    def __str__(self) -> str:
        return f"{needs(self.duration_s, self.num_bytes)}, as {self.record.cell}"


def measured_in(root: Path) -> list[Measured]:
    """Read the cells of a study that are done and know their duration; records alone count."""
    found = list[Measured]()
    for path in sorted(root.glob("*/record.json")):
        try:
            record = read_record(path)
        except ValueError:  # a sweep refuses such a cell once it comes to it
            continue
        if record.status == "done" and record.duration_s:
            files = (each for each in path.parent.rglob("*") if each.is_file())
            found.append(Measured(record, sum(each.stat().st_size for each in files)))
    return found


def most_similar(cell: Cell, measured: Iterable[Measured]) -> Measured | None:
    """Return the measured cell of the same work that is most like `cell`; None if there is none.

    Of those, the number of ranks counts first, then the batch, what is measured, the strategy, and
    the other settings.
    """
    settings = _as_text(cell.settings)
    same = [each for each in measured if _work(_as_text(each.record.settings)) == _work(settings)]
    return min(same, key=lambda each: _distance(cell, settings, each.record), default=None)


def _distance(cell: Cell, settings: dict[str, str], record: Record) -> tuple[float, ...]:
    other = _as_text(record.settings)
    apart = sum(settings.get(key) != other.get(key) for key in settings.keys() | other.keys())
    smaller, larger = sorted((cell.world_size, record.world_size))
    return (
        larger / smaller,
        abs(cell.batch_size - record.batch_size),
        cell.config.measure != record.measure,
        cell.strategy != record.strategy,
        apart,
    )


def _work(settings: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if root_of(key) in OF_WORK}


def _as_text(settings: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in settings.items()}
