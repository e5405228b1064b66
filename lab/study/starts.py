"""Which cells of a study share a start of their ranks, to take turns there."""

from __future__ import annotations

from collections import defaultdict

from lab.settings.names import root_of
from lab.study.grid import Cell, Study

# What the ranks of a start have in common: the work, and all that a process has only once.
SHARED = (
    *("model", "profile", "data", "task", "precision", "accumulate", "straggler", "cluster"),
    *("device", "backend", "share_gpus", "threads", "tf32", "deterministic", "code"),
)


def starts(study: Study) -> list[list[Cell]]:
    """Group the cells in order: each by itself, or if they take turns those of the same work."""
    if study.turns is None:
        return [[cell] for cell in study.cells]
    groups: defaultdict[object, list[Cell]] = defaultdict(list)
    for cell in study.cells:
        groups[_shared(cell)].append(cell)
    return [*groups.values()]


def _shared(cell: Cell) -> object:
    config = cell.config
    settings = {k: str(v) for k, v in cell.settings.items() if root_of(k) in SHARED}
    axes = cell.world_size, cell.repeat, cell.batch_size, config.scaling, config.measure
    return axes, str(config.comm), tuple(sorted(settings.items()))
