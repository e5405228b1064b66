"""The tables and figures that `lab.plot` writes about a study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from lab.analysis import summary
from lab.analysis.figures.convergence import convergence
from lab.analysis.figures.payload import payload
from lab.analysis.figures.sheet import NothingToDraw, Sheet
from lab.analysis.figures.speedup import scaling, speedup_bars, throughput
from lab.analysis.figures.step import step_time
from lab.analysis.figures.timeline import timeline_of_step
from lab.analysis.noise import noise_floor
from lab.analysis.points import points_of
from lab.analysis.records import load_study
from lab.analysis.speedup import table
from lab.analysis.target import times_to_target
from lab.draw.looks import looks_of
from lab.draw.save import save
from lab.record.schema import SCALINGS
from lab.record.trace import TIMELINE, read_trace

FIGURES: tuple[Callable[[Sheet], Figure], ...] = (
    *(speedup_bars, scaling, throughput),
    *(step_time, payload, convergence),
)


def report(
    folder: Path,
    out: Path,
    formats: Sequence[str],
    baseline: str | None = None,
    target: float | None = None,
) -> None:
    """Write summary.csv and all figures of the study in `folder` to `out`; print its table.

    For a single cell, draw its timeline; for a study, also those of its cells that have one.

    Args:
        folder: `runs/<study>`, or `runs/<study>/<cell>`.
        out: folder for the files; made if missing.
        formats: any of png, svg, pdf.
        baseline: as in `speedup.table`.
        target: also print the time to this value of the metric.

    Raises:
        ValueError: the study cannot be read, or has no such baseline; the cell has no timeline.
        OSError: `out` cannot be written to.
    """
    if (folder / "record.json").is_file():
        _report_cell(folder, out, formats)
    else:
        _report_study(folder, out, formats, baseline, target)


def _report_study(
    folder: Path,
    out: Path,
    formats: Sequence[str],
    baseline: str | None,
    target: float | None,
) -> None:
    study = load_study(folder)
    points = points_of(study.cells)
    rows, floor = table(study, baseline), noise_floor(points)
    out.mkdir(parents=True, exist_ok=True)
    summary.write_csv(rows, out / "summary.csv")
    print(summary.text(rows, study, floor), end="\n\n")
    if target is not None:
        print(summary.target_table(times_to_target(points, target), target), end="\n\n")
    looks = looks_of(row.series for row in rows)
    present = [name for name in SCALINGS if any(row.scaling == name for row in rows)]
    for name in present:
        selected = tuple(row for row in rows if row.scaling == name)
        suffix = "_weak" if name == "weak" and len(present) > 1 else ""
        _draw_all(Sheet(study, name, selected, looks, floor), out, suffix, formats)
    for cell in study.cells:
        if cell.repeat == 0 and (cell.folder / TIMELINE).is_file():
            _draw_timeline(cell.folder, out / f"timeline_{cell.name}", formats)


def _report_cell(folder: Path, out: Path, formats: Sequence[str]) -> None:
    if not (folder / TIMELINE).is_file():
        raise ValueError(f"{folder}: holds no {TIMELINE}; runs with measure=breakdown leave one")
    out.mkdir(parents=True, exist_ok=True)
    _draw_timeline(folder, out / "timeline", formats)


def _draw_timeline(cell: Path, stem: Path, formats: Sequence[str]) -> None:
    timeline = read_trace(cell / TIMELINE).typical_step()
    _save(lambda: timeline_of_step(timeline), stem, formats)


def _draw_all(sheet: Sheet, out: Path, suffix: str, formats: Sequence[str]) -> None:
    for draw in FIGURES:
        stem = out / f"{draw.__name__}{suffix}"
        try:
            _save(partial(draw, sheet), stem, formats)
        except NothingToDraw as reason:
            print(f"skipped {stem.name}: {reason}")


def _save(draw: Callable[[], Figure], stem: Path, formats: Sequence[str]) -> None:
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in formats]
    save(draw, *paths)
    print(f"wrote {', '.join(map(str, paths))}")
