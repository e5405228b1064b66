"""The tables and figures that `lab.plot` writes about studies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.analysis import summary
from lab.analysis.charts import NothingToDraw
from lab.analysis.export import write_records
from lab.analysis.records import Study, read_steps
from lab.analysis.results import NAMES as CHARTS
from lab.analysis.results import Results, load
from lab.analysis.target import times_to_target
from lab.analysis.timeline import own_work, own_work_of_ranks, timeline_of_step
from lab.draw.chart import Chart, pixels_of
from lab.record.schema import read_record
from lab.record.steps import STEPS
from lab.record.trace import TIMELINE, read_trace
from lab.settings.reading import DamagedFile

TIMELINES, RANKS = "timeline", "ranks"
FIGURES = [name for name in CHARTS if name not in ("speedup", "efficiency")]  # scaling has both
NAMES = (*FIGURES, TIMELINES, RANKS)


@dataclass(frozen=True)
class Sink:
    """Where figures go, and how they look.

    Attributes:
        out: folder for the files, made if missing; None: STUDY/figures, or of several studies a
            folder beside the first.
        formats: any of png, svg, pdf.
        only: names of figures (NAMES), or how they begin; empty: all.
        width_in: exact width in inches, as of a paper's column; None: a screen's.
        title: whether figures have title and notes; without, they are printed as a caption.
    """

    out: Path | None
    formats: Sequence[str]
    only: Sequence[str] = field(default=())
    width_in: float | None = None
    title: bool = True

    def wants(self, name: str) -> bool:
        """Return whether a figure of this name is to be drawn."""
        return not self.only or any(name.startswith(word) for word in self.only)

    def check(self) -> None:
        """Refuse names that are no figure's. ValueError: names one, and those there are."""
        for word in self.only:
            if not any(name.startswith(word) for name in NAMES):
                raise ValueError(f"only={word}: allowed are {', '.join(NAMES)}")

    def draw(self, name: str, stem: Path, make: Callable[[int], Chart]) -> None:
        """Write the figure that `make` returns for a width in pixels, or say why there is none."""
        if not self.wants(name):
            return
        try:
            chart = make(pixels_of(self.width_in))
        except (NothingToDraw, DamagedFile) as reason:
            print(f"skipped {stem.name}: {reason}")
            return
        paths = chart.write(stem, self.formats, self.width_in, self.title)
        print(f"wrote {', '.join(map(str, paths))}")
        if not self.title:
            print(f"caption: {chart.caption}")


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
        baseline: as in `lab.load`.
        target: also print the time to this value of the metric.

    Raises:
        ValueError: a study cannot be read, or has no such baseline; the cell has nothing to draw.
        OSError: the folder for the files cannot be written to.
    """
    sink.check()
    if len(folders) == 1 and (folders[0] / "record.json").is_file():
        _report_cell(folders[0], sink)
    else:
        _report_study(load(*folders, baseline=baseline), sink, target)


def _report_study(results: Results, sink: Sink, target: float | None) -> None:
    study, rows = results.study, results.rows
    out = _made(sink.out or _folder_of(study))
    summary.write_csv(rows, out / "summary.csv")
    write_records(results.frame, out)
    print(summary.text(rows, study, results.floor), end="\n\n")
    if target is not None:
        print(summary.target_table(times_to_target(results.points, target), target), end="\n\n")
    for scaling in results.scalings:
        suffix = "_weak" if scaling == "weak" and len(results.scalings) > 1 else ""
        for name in FIGURES:
            if name != "map_of_strategies" or (results.has_map and scaling == "strong"):
                sink.draw(name, out / f"{name}{suffix}", _maker(results, name, scaling))
    for cell in study.cells:
        if cell.repeat == 0 and (cell.folder / TIMELINE).is_file():
            stem = out / f"{TIMELINES}_{study.name_of(cell.folder).replace('/', '_')}"
            sink.draw(TIMELINES, stem, lambda width, at=cell.folder: _timeline(at, width))


def _maker(results: Results, name: str, scaling: str) -> Callable[[int], Chart]:
    def make(width: int) -> Chart:
        chart = results.chart(name, scaling, width)
        return replace(chart, about=[*chart.about, *results.notes(scaling)])

    return make


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
    if steps is not None:
        record = read_record(folder / "record.json")
        sink.draw(RANKS, out / RANKS, lambda width: own_work_of_ranks(steps, record, width))
    if has_timeline:
        sink.draw(TIMELINES, out / TIMELINES, lambda width: _timeline(folder, width))


def _timeline(cell: Path, width: int) -> Chart:
    return timeline_of_step(read_trace(cell / TIMELINE).typical_step(), width)


def _folder_of(study: Study) -> Path:
    """Return the folder for figures; those of several studies must not replace those of one."""
    if not study.labels:
        return study.folder / "figures"
    return study.folder.parent / "+".join(study.labels.values()).replace("/", "-")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
