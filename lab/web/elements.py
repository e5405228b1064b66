"""The elements of a page: tables, charts, and results of lab.bench."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vl_convert import javascript_bundle

from lab.analysis.points import Point, has_ranking, leaders, together
from lab.analysis.summary import runs_text, unit_of
from lab.benchmarks.present import chart_of, is_result, text_of
from lab.codec.build import cache_folder
from lab.draw.chart import CLIP, VL_VERSION, Chart, drawn
from lab.draw.text import UNKNOWN_TEXT, number_text, sentence
from lab.measure.statistics import Interval, of_level
from lab.settings.errors import one_line
from lab.settings.storage import DamagedFile, read_json, write_text
from lab.task import heading, main_metric

WIDER = 30  # pixels between a legend's entries
WIDTH = 1250  # pixels of a page's charts; a narrower page makes them smaller
TAG = re.compile(r"<[^>]*>")
DIGITS = re.compile(r"(\.\d\d)\d{3,}")  # of places in a drawing
# Attributes that a page needs not: its figures have names, and its style says the rest.
SAID = re.compile(
    r' (?:(?:role|aria-[a-z]+|font-family|pointer-events|stroke-miterlimit)="[^"]*"'
    r'|font-size="11px"|opacity="1"|stroke-width="1"|class="mark-[a-z]+ role-(?!mark)[^"]*")'
)
NOTHING = re.compile(
    r'<path class="(?:foreground" d="" display="none"|background" d="M0,0h0v\d*h0Z")/>'
)


@dataclass(frozen=True)
class Table:
    """A table that a reader may sort by any column and filter by any text.

    Attributes:
        name: identifies it on the page.
        note: how to read it, and what all its lines share.
    """

    name: str
    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def points_table(points: Sequence[Point], floor: float, name: str) -> Table:
    """Make a line for each point of a study, with the interval and the number of each figure.

    A column in which all points say the same is told once, above the table.

    Args:
        floor: the study's noise floor; NaN if unknown.
    """
    unit = unit_of(points)
    metric = main_metric(each for point in points for each in point.final)
    title, factor = heading(metric)
    first = {
        each.place
        for group in together(points)
        if has_ranking(group)
        for each in group
        if each.series in leaders(group, floor)
    }
    emulated = {point.emulation for point in points}
    some = {p: ("yes" if p.emulation else "no") if "" in emulated else "yes" for p in points}
    columns = {
        "scaling": [point.scaling for point in points],
        "batch": [str(point.fixed_batch_size) for point in points],
        "ranks": [str(point.world_size) for point in points],
        "strategy": [point.label for point in points],
        "n": [str(point.num_repeats) for point in points],
        "step ms": [interval_text(of_level([*p.steps_s.values()]), 1e3) for p in points],
        f"{unit}s/s": [interval_text(point.samples_per_s) for point in points],
        "speedup": [interval_text(point.speedup) for point in points],
        "efficiency %": [interval_text(point.efficiency, 100) for point in points],
        "exposed ms": [interval_text(p.exposed_exchange_s, 1e3) for p in points],
        "payload MB": [number_text(point.payload_max_bytes, 1e-6) for point in points],
        title: [number_text(p.final.get(metric, math.nan), factor) for p in points],
        "fastest": ["yes" if p.place in first else "" for p in points],
        "runs": [runs_text(point) for point in points],
        "emulated": [some[point] for point in points],
    }
    note = (
        "Brackets give 95 % intervals over n repeats, or for comparisons over the repeats that "
        "both points have. They are computed for each value separately. A row is marked as fastest "
        "if no other row with the same batch and ranks is significantly faster."
    )
    return _table(name, "Every point", note, columns)


def _table(name: str, title: str, note: str, columns: Mapping[str, Sequence[str]]) -> Table:
    told = {k: v for k, v in columns.items() if {*v} - {UNKNOWN_TEXT, ""}}
    alike = {
        key: cells[0]
        for key, cells in told.items()
        if key != "strategy" and len(cells) > 1 and len({*cells}) == 1
    }
    shown = {key: cells for key, cells in told.items() if key not in alike}
    same = ", ".join(f"{key} {text}" for key, text in alike.items())
    rows = list(zip(*shown.values(), strict=True))
    notes = [note, f"All rows have {same}." if same else ""]
    return Table(name, title, " ".join(filter(None, notes)), [*shown], rows)


def of_texts(name: str, title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table of lines of texts."""
    lines = [*rows]
    columns = dict(zip(header, zip(*lines, strict=True), strict=True)) if lines else {}
    return _table(name, title, "", columns)


def order_of(text: str) -> float | None:
    """Return the number with which a cell begins, by which a table is sorted; None: by its text."""
    try:
        return float(text.split(" ")[0].rstrip("%").replace(",", ""))
    except ValueError:
        return None


def interval_text(value: Interval, scale: float = 1.0) -> str:
    """Write a value with its interval, if it has one."""
    middle, low, high = (number_text(each, scale) for each in (value.mid, value.lo, value.hi))
    return middle if UNKNOWN_TEXT in (middle, low) else f"{middle} [{low}, {high}]"


def percent_text(ratio: Interval) -> str:
    """Write a ratio above or below 1 as a difference: +12 % [+9, +15]."""
    middle = f"{100 * (ratio.mid - 1):+z.1f} %"
    if math.isnan(ratio.lo):
        return middle
    return f"{middle} [{100 * (ratio.lo - 1):+z.1f}, {100 * (ratio.hi - 1):+z.1f}]"


@dataclass(frozen=True)
class Drawing:
    """A chart, and what a reader who cannot see it is told.

    Attributes:
        name: identifies it on the page.
        title: what it shows.
        note: how to read it: number of runs, kind of intervals.
        shared: notes that the study's other charts have too.
        spec: Vega-Lite, with its data inside.
    """

    name: str
    title: str
    note: str
    shared: Sequence[str]
    spec: dict[str, Any]

    def svg(self) -> str:
        """Draw the chart, as it is without JavaScript."""
        svg = NOTHING.sub("", SAID.sub("", drawn(self.spec, "svg").decode()))
        svg = TAG.sub(lambda found: DIGITS.sub(r"\1", found[0]), svg)
        return CLIP.sub(lambda found: f"{self.name}-{found[0]}", svg)  # a page has one name space


def drawing(name: str, chart: Chart) -> Drawing:
    """Prepare a chart for a page, which writes its title itself."""
    spec = chart.spec(title=False)
    del spec["$schema"]  # the page's own library reads it
    spec["config"] |= {"background": None, "aria": False, "padding": 2}
    # Without JavaScript the reader's font may be wider than the one measured here.
    spec["config"]["legend"]["columnPadding"] = WIDER
    about, notes = ([*map(sentence, lines)] for lines in (chart.about, chart.notes))
    return Drawing(name, chart.message, " ".join(about), notes, spec)


def bundle() -> str:
    """Return the script that makes charts interactive.

    vl-convert makes it in two seconds, so it is kept in the user's cache.
    """
    path = cache_folder() / f"vega-{version('vl-convert-python')}-{VL_VERSION}.js"
    if not path.exists():
        made = javascript_bundle(vl_version=VL_VERSION)  # pyright: ignore[reportCallIssue]
        write_text(path, made)
    return path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Benched:
    """A benchmark's result.

    Attributes:
        text: its table, and how to read it.
        picture: a data URL of its figure; empty: it has none.
    """

    title: str
    command: str
    text: str
    picture: str


def read_benched(path: Path) -> Benched:
    """Read a result of lab.bench.

    Raises:
        DamagedFile: it holds no such result.
        OSError: it cannot be read.
    """
    result = read_json(path)
    if not is_result(result):
        raise DamagedFile(f"{path}: not a result of lab.bench")
    name = path.stem.replace("_", " ")
    title = f"Benchmark {': '.join(dict.fromkeys([result['bench'], name]))}"
    try:
        return Benched(title, str(result["command"]), text_of(result), _picture(result))
    except Exception as error:  # a damaged result fails in many ways
        why = f"{type(error).__name__}: {one_line(error)}"
        raise DamagedFile(f"{path}: not a result of lab.bench: {why}") from None


def _picture(result: dict[str, Any]) -> str:
    chart = chart_of(result)
    if not chart:
        return ""
    data = base64.b64encode(drawn(chart.spec(), "svg")).decode()
    return f"data:image/svg+xml;base64,{data}"
