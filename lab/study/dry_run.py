"""Show what a sweep would run, and what it would take; start nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.draw.text import aligned, number_of
from lab.record.schema import Record, read_record
from lab.settings.names import root_of
from lab.study.grid import Cell, Study, series_of
from lab.study.launch import recorded

UNKNOWN = "time unknown, because no finished cell has the same model, data and steps"
# Settings that say what is computed and for how long; in these, a similar cell has to be equal.
OF_WORK = (
    *("model", "profile", "data", "task", "steps", "epochs", "accumulate"),
    *("warmup_steps", "eval_every", "checkpoint_every"),
)


def lines(study: Study) -> Iterator[str]:
    """Describe a study as a table: a line for each strategy, what it lacks and needs, and the sum.

    Raises:
        ConfigError: a file in the study's folder is no record.
    """
    root = Path(study.runs_dir) / study.name
    measured = measured_in(root)
    parts = defaultdict[str, _Part](_Part)
    for cell, series in zip(study.cells, series_of(study.cells), strict=True):
        part, record = parts[series], recorded(root, cell, study.retries)
        part.cells.append(cell)
        if record:
            part.outcomes[record.status] += 1
        else:
            part.likes.append(most_similar(cell, measured))
    likes = [like for part in parts.values() for like in part.likes]
    head = ["strategy", "ranks", "batch", "cells", "done", "to run", "minutes", "MB"]
    yield from aligned([head, *(part.row(name) for name, part in parts.items())])
    others = sum((part.outcomes for part in parts.values()), Counter[str]())
    for status, count in others.items():
        if status != "done":
            yield f"{count} {status} already (retry=failed runs it again)"
    yield f"would run {len(likes)} of {len(study.cells)} cells: {_sum(likes)}"


@dataclass
class _Part:
    """The cells of one strategy, by outcome; of those to run the most similar one that is done."""

    cells: list[Cell] = field(default_factory=list[Cell])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    likes: list[FinishedCell | None] = field(default_factory=list["FinishedCell | None"])

    def row(self, name: str) -> list[str]:
        ranks = sorted({cell.world_size for cell in self.cells})
        batches = sorted({cell.batch_size for cell in self.cells})
        needed = _needs([like for like in self.likes if like]) or ("?", "?")
        counts = [str(len(self.cells)), str(self.outcomes["done"]), str(len(self.likes))]
        axes = [",".join(map(str, values)) for values in (ranks, batches)]
        return [name, *axes, *counts, *(needed if self.likes else ("", ""))]


def _sum(likes: list[FinishedCell | None]) -> str:
    known = [like for like in likes if like]
    if not likes:
        return "nothing to run"
    if not (needed := _needs(known)):
        return UNKNOWN
    minutes, megabytes = needed
    rest = len(likes) - len(known)
    alike = "estimated from the most similar finished cells, without start-up time"
    text = f"about {minutes} min, {megabytes} MB, {alike}"
    return text + (f"; for {number_of(rest, 'cell')}, {UNKNOWN}" if rest else "")


def _needs(known: Sequence[FinishedCell]) -> tuple[str, str] | None:
    """Return the minutes and the MB that cells took together; None without cells."""
    seconds = sum(each.seconds for each in known)
    num_bytes = sum(each.num_bytes for each in known)
    return (_short(seconds / 60), _short(num_bytes / 1e6)) if known else None


def _short(value: float) -> str:
    return f"{value:.1g}" if value < 1 else f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class FinishedCell:
    """A cell that is done.

    Attributes:
        seconds: its share of the time of all cells that took turns with it.
        num_bytes: of its directory.
    """

    record: Record
    seconds: float
    num_bytes: int


def measured_in(root: Path) -> list[FinishedCell]:
    """Read the cells of a study that are done and know their duration; records alone count."""
    found = list[tuple[Record, int]]()
    for path in sorted(root.glob("*/record.json")):
        try:
            record = read_record(path)
        except ValueError:  # a sweep refuses such a cell once it comes to it
            continue
        if record.status == "done" and record.duration_s:
            files = (each for each in path.parent.rglob("*") if each.is_file())
            found.append((record, sum(each.stat().st_size for each in files)))
    starts = Counter(record.started_at for record, _ in found if record.turns_s)
    return [
        FinishedCell(
            record, (record.duration_s or 0.0) / (starts[record.started_at] or 1), num_bytes
        )
        for record, num_bytes in found
    ]


def most_similar(cell: Cell, measured: Iterable[FinishedCell]) -> FinishedCell | None:
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
