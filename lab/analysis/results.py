"""Results of studies as tables and charts: of `lab.load("runs/demo")` and of `lab.plot`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.charts import CHARTS, NothingToDraw
from lab.analysis.places import map_of_strategies, on_most_ranks, places_of
from lab.analysis.points import (
    Place,
    Point,
    floor_text,
    frame_of,
    leaders,
    noise_floor,
    table,
    together,
)
from lab.analysis.records import RecordedStudy, load_study, read_steps
from lab.analysis.runs import convergence, own_work, own_work_of_ranks, timeline_of_step
from lab.analysis.summary import (
    records_table,
    shared_runs,
    target_table,
    text,
    write_csv,
    write_records,
)
from lab.draw.chart import WIDTH, Chart, Look, looks_of, pixels_of
from lab.draw.text import number_of, short_text
from lab.record.recorders import WandbRecorder
from lab.record.schema import SCALINGS, read_record
from lab.record.steps import STEPS
from lab.record.trace import TIMELINE, read_trace
from lab.settings.errors import one_line
from lab.settings.storage import DamagedFile
from lab.task import main_metric

NAMES = (*CHARTS, convergence.__name__, map_of_strategies.__name__)
TIMELINES, RANKS = "timeline", "ranks"
FIGURES = [name for name in NAMES if name not in ("speedup", "efficiency")]  # scaling has both
ALL = (*FIGURES, TIMELINES, RANKS)
SHOWN = {  # columns of a notebook's table, and their titles
    **{"series": "series", "world_size": "ranks", "fixed_batch_size": "batch"},
    **{"num_repeats": "repeats", "step_s": "step (ms)", "speedup_mid": "speedup"},
    **{"speedup_lo": "from", "speedup_hi": "to", "payload_max_bytes": "MB sent"},
}
SCALES = {"step_s": 1e3, "payload_max_bytes": 1e-6}


class Results:
    """The results of one or more studies, as `lab.load` returns them.

    Attributes:
        study: the runs, and the reasons why other runs cannot be read.
    """

    def __init__(self, study: RecordedStudy, baseline: str | None = None) -> None:
        self.study, self._baseline = study, baseline

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A table with a row for each run, including failed runs.

        The columns are named after the record's keys, joined with dots, such as `step_s.median` (in
        seconds) and `settings.optim.lr`. Lists are stored as JSON text.
        """
        return records_table(self.study)

    @cached_property
    def points(self) -> list[Point]:
        """The points of the study, with their runs and statistics."""
        return table(self.study, self._baseline)

    @cached_property
    def noise_floor(self) -> float:
        """The noise floor (lab.analysis.points); NaN if unknown."""
        return noise_floor(self.points)

    @cached_property
    def looks(self) -> dict[str, Look]:
        """The look of each series, in reading order: the same in all charts."""
        return looks_of(point.series for point in self.points)

    @property
    def has_map(self) -> bool:
        """Whether strategies were compared over several links, or machines."""
        places = on_most_ranks(places_of(self.study.cells))
        return len({place.where.links for place in places}) > 1

    @property
    def scalings(self) -> list[str]:
        """The scalings that were measured."""
        return [each for each in SCALINGS if any(p.scaling == each for p in self.points)]

    def summary(self) -> pd.DataFrame:
        """Return a table with a row for each series, number of ranks and batch size.

        Times are in seconds and sizes in bytes. Some columns need an explanation:

        * `speedup_mid` is the speedup, and `speedup_lo` and `speedup_hi` are its 95 % interval over
          repeats. NaN means that it was not measured.
        * `leads` is true if no other series is significantly faster at this point.
        * `label` is the name of the series without the settings that most series share. `usual`
          lists these settings.
        * `metric` is the name of the column that contains the task's main metric.
        """
        return self._summary.copy()

    @cached_property
    def _summary(self) -> Any:
        summary = frame_of(self.points)
        summary["label"] = [point.label for point in self.points]
        summary["usual"] = ", ".join(f"{k}={v}" for k, v in self.study.usual.items())
        summary["fixed_batch_size"] = [point.fixed_batch_size for point in self.points]
        first = [(group, set(leaders(group, self.noise_floor))) for group in together(self.points)]
        leading = {
            point.place for group, names in first for point in group if point.series in names
        }
        summary["leads"] = [point.place in leading for point in self.points]
        summary["metric"] = main_metric(name for point in self.points for name in point.final)
        return summary

    def chart(
        self,
        name: str = "speedup",
        scaling: str | None = None,
        width: int = WIDTH,
        commands: Mapping[Place, str] | None = None,
    ) -> Chart:
        """Return a chart, with its message and its notes.

        Args:
            name: of NAMES.
            scaling: "strong" or "weak"; None: the one that was measured, strong of both.
            width: pixels.
            commands: how to measure a point again, told where the pointer rests.

        Raises:
            ValueError: there is no such chart, or nothing was measured that it shows.
        """
        if name not in NAMES:
            raise ValueError(f"figure={name}: no such figure; allowed: {', '.join(NAMES)}")
        summary = self._summary
        found = self.scalings
        wanted = scaling or next(iter(found), "strong")
        if wanted not in found:
            raise NothingToDraw(
                f"scaling={wanted}: was not measured; allowed: {', '.join(found) or 'none'}"
            )
        if name == convergence.__name__:
            return convergence(self.study.cells, wanted, self.looks, width)
        if name == map_of_strategies.__name__:
            return map_of_strategies(self.study.cells, self.noise_floor, width)
        if commands:
            summary = summary.assign(command=[commands.get(p.place, "") for p in self.points])
        return CHARTS[name](summary[summary["scaling"] == wanted], self.looks, width)

    def notes(self, scaling: str) -> list[str]:
        """Say what was run on which machines, what differences count, and whose runs are shared."""
        machines = self.study.machines
        keys = ("model", "data", *(() if machines else ("device", "machine")))
        values = {
            key: sorted({c.settings[key] for c in self.study.cells if key in c.settings})
            for key in keys
        }
        about = [f"{key} {', '.join(each)}" for key, each in values.items() if each]
        lines = [
            " · ".join([f"study {self.study.name}", *about]),
            "; ".join(f"machine on={label}: {text}" for label, text in machines.items()),
            floor_text(self.noise_floor),
            shared_runs(p for p in self.points if p.scaling == scaling),
        ]
        return [line for line in lines if line]

    def figure(self, name: str = "speedup", scaling: str | None = None) -> Any:
        """Return an Altair chart, which notebooks display.

        Args:
            name: of NAMES, such as "speedup", "efficiency", "throughput" or "payload".
            scaling: "strong" or "weak". None: the one that was measured, strong if both were.

        Raises:
            ValueError: there is no such chart, or nothing was measured that it can show.
        """
        return self.chart(name, scaling).with_title()

    def _repr_html_(self) -> str:
        """Show the points as a table, as notebooks do."""
        shown: Any = self.summary()[list(SHOWN)]
        scaled = shown.assign(**{key: shown[key] * by for key, by in SCALES.items()})
        html = scaled.rename(columns=SHOWN).to_html(index=False, na_rep="", float_format=short_text)
        return f"<h4>{escape(self.study.name)}: {self._runs()}</h4>{html}"

    def __repr__(self) -> str:
        return f"Results({self.study.name}: {self._runs()}, {number_of(len(self.points), 'point')})"

    def _runs(self) -> str:
        """Count the runs, and those that are not among them (`study.missing` says why)."""
        lost = f", {len(self.study.missing)} unreadable" if self.study.missing else ""
        return number_of(len(self.study.cells), "run") + lost


def load(folder: str | Path, *more: str | Path, baseline: str | None = None) -> Results:
    """Read the runs of one study, or of several studies as one.

    Args:
        folder: the study's folder, such as runs/demo.
        more: folders of further studies.
        baseline: the strategy whose one-rank runs are the baseline of speedups. None: `none` if it
            was measured, and otherwise each series' own one-rank runs.

    Raises:
        ValueError: the folder does not exist, or contains no readable record.
    """
    return Results(load_study(Path(folder), *map(Path, more)), baseline)


@dataclass(frozen=True)
class Sink:
    """Where figures go, and how they look.

    Attributes:
        out: folder for the files, made if missing; None: STUDY/figures, or of several studies a
            folder beside the first.
        formats: any of png, svg, pdf.
        only: names of figures (ALL), or how they begin; empty: all.
        width_in: exact width in inches, as of a paper's column; None: a screen's.
        title: whether figures have title and notes; without, they are printed as a caption.
        recorder: "wandb" keeps what was written there too, as an artifact of the study.
    """

    out: Path | None
    formats: Sequence[str]
    only: Sequence[str] = field(default=())
    width_in: float | None = None
    title: bool = True
    recorder: str = "local"

    def wants(self, name: str) -> bool:
        """Return whether a figure of this name is to be drawn."""
        return not self.only or any(name.startswith(word) for word in self.only)

    def check(self) -> None:
        """Refuse names that are no figure's. ValueError: names one, and those there are; or wandb
        is not installed.
        """
        if self.recorder == "wandb":
            WandbRecorder()
        for word in self.only:
            if not any(name.startswith(word) for name in ALL):
                raise ValueError(f"only={word}: no such figure; allowed: {', '.join(ALL)}")

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

    def keep(self, folder: Path, study: str) -> None:
        """Hand the files in `folder` to the recorder. ValueError: it cannot take them."""
        if self.recorder != "wandb":
            return
        try:
            WandbRecorder().publish(folder, study)
        except Exception as error:  # no network, or no account
            raise ValueError(f"recorder=wandb: {one_line(error)}") from None


def report(
    folders: Sequence[Path], sink: Sink, baseline: str | None = None, target: float | None = None
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
    study, points = results.study, results.points
    out = _made(sink.out or _folder_of(study))
    write_csv(points, out / "summary.csv")
    write_records(results.frame, out)
    print(text(points, study, results.noise_floor), end="\n\n")
    if target is not None:
        print(target_table(points, target), end="\n\n")
    for scaling in results.scalings:
        suffix = "_weak" if scaling == "weak" and len(results.scalings) > 1 else ""
        for name in FIGURES:
            if name != "map_of_strategies" or (results.has_map and scaling == "strong"):
                sink.draw(name, out / f"{name}{suffix}", partial(_noted, results, name, scaling))
    for cell in study.cells:
        if cell.repeat == 0 and (cell.folder / TIMELINE).is_file():
            stem = out / f"{TIMELINES}_{study.name_of(cell.folder).replace('/', '_')}"
            sink.draw(TIMELINES, stem, partial(_timeline, cell.folder))
    sink.keep(out, "+".join(study.labels.values()) or study.folder.name)


def _noted(results: Results, name: str, scaling: str, width: int) -> Chart:
    """Return a chart that says itself what a page says once."""
    chart = results.chart(name, scaling, width)
    return replace(chart, notes=[*chart.notes, *results.notes(scaling)])


def _report_cell(folder: Path, sink: Sink) -> None:
    """Draw a cell's own work of ranks, and its timeline, as far as it has them."""
    has_timeline = (folder / TIMELINE).is_file()
    try:
        steps = read_steps(folder / STEPS)
        own_work(steps)
    except (ValueError, OSError) as error:
        if not has_timeline:
            raise ValueError(
                f"{folder}: nothing to draw: {error}, and there is no {TIMELINE}, which only "
                "runs with measure=breakdown write"
            ) from None
        steps = None
    out = _made(sink.out or folder / "figures")
    if steps is not None:
        record = read_record(folder / "record.json")
        sink.draw(RANKS, out / RANKS, partial(own_work_of_ranks, steps, record))
    if has_timeline:
        sink.draw(TIMELINES, out / TIMELINES, partial(_timeline, folder))
    sink.keep(out, folder.parent.name)


def _timeline(cell: Path, width: int) -> Chart:
    return timeline_of_step(read_trace(cell / TIMELINE).typical_step(), width)


def _folder_of(study: RecordedStudy) -> Path:
    """Return the folder for figures; those of several studies must not replace those of one."""
    if not study.labels:
        return study.folder / "figures"
    return study.folder.parent / "+".join(study.labels.values()).replace("/", "-")


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out={folder}: cannot make this folder: {error.strerror}") from None
    return folder
