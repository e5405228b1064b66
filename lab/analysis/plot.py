"""The tables and figures that `lab.plot` writes about studies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from lab.analysis import summary
from lab.analysis.export import write_records
from lab.analysis.figures.convergence import convergence
from lab.analysis.figures.map import map_of_strategies
from lab.analysis.figures.payload import payload
from lab.analysis.figures.ranks import own_work, own_work_of_ranks
from lab.analysis.figures.speedup import scaling, speedup_bars, throughput
from lab.analysis.figures.step import step_time
from lab.analysis.figures.timeline import timeline_of_step
from lab.analysis.noise import noise_floor
from lab.analysis.points import points_of
from lab.analysis.records import Study, load_study, read_steps
from lab.analysis.sheet import NothingToDraw, Sheet
from lab.analysis.speedup import table
from lab.analysis.target import times_to_target
from lab.draw.looks import looks_of
from lab.draw.page import SCREEN, Page
from lab.draw.save import save
from lab.record.schema import SCALINGS, read_record
from lab.record.steps import STEPS
from lab.record.trace import TIMELINE, read_trace
from lab.settings.reading import DamagedFile

FIGURES: tuple[Callable[[Sheet], Figure], ...] = (
    *(speedup_bars, scaling, throughput),
    *(step_time, payload, convergence),
)
TIMELINES = "timeline"
RANKS = "ranks"
MAP = map_of_strategies.__name__  # of studies of several links
NAMES = (*(draw.__name__ for draw in FIGURES), MAP, TIMELINES, RANKS)


@dataclass(frozen=True)
class Sink:
    """Where figures go, and how they look.

    Attributes:
        out: folder for the files, made if missing; None: STUDY/figures, or of several studies a
            folder beside the first.
        formats: any of png, svg, pdf.
        only: names of figures (NAMES), or how they begin; empty: all.
    """

    out: Path | None
    formats: Sequence[str]
    page: Page = SCREEN
    only: Sequence[str] = field(default=())

    def wants(self, name: str) -> bool:
        """Return whether a figure of this name is to be drawn."""
        return not self.only or any(name.startswith(word) for word in self.only)

    def check(self) -> None:
        """Refuse names that are no figure's. ValueError: names one, and those there are."""
        for word in self.only:
            if not any(name.startswith(word) for name in NAMES):
                raise ValueError(f"only={word}: allowed are {', '.join(NAMES)}")


def report(
    folders: Sequence[Path],
    sink: Sink,
    baseline: str | None = None,
    target: float | None = None,
) -> None:
    """Write the tables and figures of the studies in `folders`, as one study; print its table.

    For a single cell, draw the own work of its ranks, and its timeline if it has one; for studies,
    also the timelines of their cells.

    Args:
        folders: `runs/<study>`, or one `runs/<study>/<cell>`.
        baseline: as in `speedup.table`.
        target: also print the time to this value of the metric.

    Raises:
        ValueError: a study cannot be read, or has no such baseline; the cell has nothing to draw.
        OSError: the folder for the files cannot be written to.
    """
    sink.check()
    if len(folders) == 1 and (folders[0] / "record.json").is_file():
        _report_cell(folders[0], sink)
    else:
        _report_study(load_study(*folders), sink, baseline, target)


def _report_study(study: Study, sink: Sink, baseline: str | None, target: float | None) -> None:
    points = points_of(study.cells)
    rows, floor = table(study, baseline), noise_floor(points)
    out = _made(sink.out or _folder_of(study))
    summary.write_csv(rows, out / "summary.csv")
    write_records(study, out)
    print(summary.text(rows, study, floor), end="\n\n")
    if target is not None:
        print(summary.target_table(times_to_target(points, target), target), end="\n\n")
    looks = looks_of(row.series for row in rows)
    present = [name for name in SCALINGS if any(row.scaling == name for row in rows)]
    for name in present:
        selected = tuple(row for row in rows if row.scaling == name)
        suffix = "_weak" if name == "weak" and len(present) > 1 else ""
        _draw_all(Sheet(study, name, selected, looks, floor, sink.page), out, suffix, sink)
    for cell in study.cells:
        if sink.wants(TIMELINES) and cell.repeat == 0 and (cell.folder / TIMELINE).is_file():
            stem = out / f"{TIMELINES}_{study.name_of(cell.folder).replace('/', '_')}"
            try:
                _draw_timeline(cell.folder, stem, sink)
            except DamagedFile as reason:
                print(f"skipped {stem.name}: {reason}")


def _report_cell(folder: Path, sink: Sink) -> None:
    """Draw a cell's own work of ranks, and its timeline, as far as it has them."""
    has_timeline = (folder / TIMELINE).is_file()
    try:
        steps = read_steps(folder / STEPS)
        own_work(steps)
    except (ValueError, OSError) as error:
        if not has_timeline:
            raise ValueError(
                f"{folder}: nothing to draw: {error}; and no {TIMELINE}, which runs with "
                "measure=breakdown leave"
            ) from None
        steps = None
    out = _made(sink.out or folder / "figures")
    if steps is not None and sink.wants(RANKS):
        record = read_record(folder / "record.json")
        _save(partial(own_work_of_ranks, steps, record, sink.page), out / RANKS, sink)
    if has_timeline and sink.wants(TIMELINES):
        _draw_timeline(folder, out / TIMELINES, sink)


def _folder_of(study: Study) -> Path:
    """Return the folder for figures; those of several studies must not replace those of one."""
    if not study.labels:
        return study.folder / "figures"
    return study.folder.parent / "+".join(study.labels.values()).replace("/", "-")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _draw_timeline(cell: Path, stem: Path, sink: Sink) -> None:
    timeline = read_trace(cell / TIMELINE).typical_step()
    _save(lambda: timeline_of_step(timeline, sink.page), stem, sink)


def _draw_all(sheet: Sheet, out: Path, suffix: str, sink: Sink) -> None:
    several_links = len({cell.circumstances for cell in sheet.study.cells}) > 1
    maps = several_links and sheet.scaling == "strong"
    for draw in (*FIGURES, map_of_strategies) if maps else FIGURES:
        stem = out / f"{draw.__name__}{suffix}"
        if not sink.wants(draw.__name__):
            continue
        try:
            _save(partial(draw, sheet), stem, sink)
        except NothingToDraw as reason:
            print(f"skipped {stem.name}: {reason}")


def _save(draw: Callable[[], Figure], stem: Path, sink: Sink) -> None:
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in sink.formats]
    figure = save(draw, *paths, page=sink.page)
    print(f"wrote {', '.join(map(str, paths))}")
    if not sink.page.title:
        print(f"caption: {figure.get_label()}")
