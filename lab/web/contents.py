"""Everything that a page says about one study."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.analysis.differences import place_of
from lab.analysis.noise import floor_text, noise_floor
from lab.analysis.points import Point, points_of
from lab.analysis.records import Study, load_study
from lab.analysis.sheet import Sheet
from lab.analysis.speedup import Row, shared_runs, table
from lab.analysis.summary import leader_lines
from lab.diagnosis.evidence import Evidence, evidence_of, sweep_command
from lab.diagnosis.rules import Verdict, judge, remedies
from lab.diagnosis.view import full, headline, reason
from lab.draw.looks import looks_of
from lab.record.schema import SCALINGS
from lab.record.trace import TIMELINE, read_trace
from lab.settings.reading import DamagedFile, read_json
from lab.web.charts import charts_of
from lab.web.judged import claims_tables, predictions_table
from lab.web.map import map_chart
from lab.web.sentences import verdict
from lab.web.tables import Table, of_texts, points_table
from lab.web.timeline import timeline_chart
from lab.web.vega import Chart

MOST_SERIES = 40  # of a chart; more look alike
MOST_TIMELINES = 8  # of a study: first repeats of as many breakdowns
MACHINE = ("hostname", "cpu", "num_cores", "memory_gib", "gpus", "os", "python", "torch", "nccl")


@dataclass(frozen=True)
class Explanation:
    """Why a point takes as long as it does: in a line, and with evidence and remedies."""

    headline: str
    text: str


@dataclass
class Contents:
    """A study as a page shows it.

    Attributes:
        verdict: two sentences.
        facts: what was run, and on what, by name.
        notes: on reading tables and charts.
        left_out: what the study cannot show, and why.
        records: every record, as its file has it.
    """

    study: Study
    rows: Sequence[Row]
    floor: float
    verdict: Sequence[str]
    facts: dict[str, str]
    notes: Sequence[str]
    tables: list[Table]
    charts: list[Chart]
    timelines: list[Chart]
    explanations: list[Explanation]
    records: list[dict[str, Any]]
    left_out: list[str] = field(default_factory=list[str])


def contents_of(folder: Path, prefix: str) -> Contents:
    """Collect everything about the study in a folder.

    Args:
        prefix: begins the names of its tables and charts, which are unique on a page.

    Raises:
        ValueError: the study cannot be read.
    """
    study = load_study(folder)
    points = points_of(study.cells)
    rows, floor, left_out = table(study), noise_floor(points), list[str]()
    explained = [(each, judge(each)) for each in _evidence(study, points, floor, left_out)]
    notes = (*leader_lines(rows, floor), floor_text(floor), shared_runs(rows))
    made = Contents(
        study=study,
        rows=rows,
        floor=floor,
        verdict=verdict(rows, floor, {place_of(e.one): reason(e, v) for e, v in explained}),
        facts=_facts(study),
        notes=[note for note in notes if note],
        tables=[points_table(rows, f"{prefix}points")],
        charts=_charts(study, rows, points, floor, prefix, left_out),
        timelines=_timelines(study, prefix, left_out),
        explanations=[_explanation(e, v) for e, v in explained],
        records=[read_json(c.folder / "record.json") for c in study.cells],
        left_out=left_out,
    )
    for find in (predictions_table, claims_tables):
        try:
            made.tables += find(folder, study, prefix)
        except ValueError as why:
            left_out.append(str(why))
    made.tables += _troubles(study, prefix)
    if (number := len(_series(rows))) > MOST_SERIES:
        left_out.append(f"charts by series: {number} series could not be told apart")
    return made


def _evidence(
    study: Study, points: list[Point], floor: float, left_out: list[str]
) -> list[Evidence]:
    found = list[Evidence]()
    for point in points:
        try:
            found.append(evidence_of(study, point.one, point, points, floor))
        except DamagedFile as why:
            left_out.append(f"an explanation: {why}")
        except ValueError:  # a failed run, one rank, or no timed step: nothing to explain
            continue
    return found


def _explanation(evidence: Evidence, found: Verdict) -> Explanation:
    text = full(evidence, found, remedies(evidence, found))
    return Explanation(headline(evidence, found), text.partition("\n\n")[2])


def _charts(
    study: Study,
    rows: Sequence[Row],
    points: Sequence[Point],
    floor: float,
    prefix: str,
    left_out: list[str],
) -> list[Chart]:
    mapped = map_chart(study, floor, f"{prefix}map")
    looks = looks_of(_series(rows))
    if len(looks) > MOST_SERIES:
        return [mapped] if mapped else []
    commands = {
        place_of(point.one): sweep_command(
            study, point.one, point.one.strategy, str(point.one.world_size)
        )
        for point in points
    }
    by_scaling = [
        chart
        for scaling in SCALINGS
        for of_scaling in [tuple(row for row in rows if row.scaling == scaling)]
        if of_scaling
        for chart in charts_of(
            Sheet(study, scaling, of_scaling, looks, floor), commands, prefix, left_out
        )
    ]
    return [mapped, *by_scaling] if mapped else by_scaling


def _series(rows: Sequence[Row]) -> set[str]:
    return {row.series for row in rows}


def _timelines(study: Study, prefix: str, left_out: list[str]) -> list[Chart]:
    cells = [c for c in study.cells if c.repeat == 0 and (c.folder / TIMELINE).is_file()]
    charts = list[Chart]()
    for number, cell in enumerate(cells[:MOST_TIMELINES]):
        title = f"{cell.series} on {cell.world_size} ranks, batch {cell.batch_size}"
        try:
            timeline = read_trace(cell.folder / TIMELINE)
            charts.append(timeline_chart(f"{prefix}timeline-{number}", title, timeline))
        except ValueError as why:
            left_out.append(f"a timeline: {why}")
    if len(cells) > MOST_TIMELINES:
        left_out.append(f"{len(cells) - MOST_TIMELINES} timelines after the first {MOST_TIMELINES}")
    return charts


def _facts(study: Study) -> dict[str, str]:
    """List what was run, when and on what; values in which runs differ side by side."""
    cells = study.cells
    done = sum(cell.status == "done" for cell in cells)
    times = sorted(cell.started_at for cell in cells if cell.started_at)
    facts = {
        "runs": f"{done} of {len(cells)} done",
        "measured": " to ".join(dict.fromkeys([times[0][:16], times[-1][:16]])) if times else "",
        "commits": _values(cell.commit[:10] or "changed files" for cell in cells),
    }
    for key in ("model", "data", "precision", "device"):
        facts[key] = _values(cell.settings.get(key, "") for cell in cells)
    for key in MACHINE:
        facts[key] = _values(_worded(cell.environment.get(key)) for cell in cells)
    return {key: text for key, text in facts.items() if text}


def _troubles(study: Study, prefix: str) -> list[Table]:
    """Make tables of runs that failed, of what did nothing, and of steps that others made."""
    failed = [
        (study.name_of(c.folder), c.status, c.error or "no error was recorded")
        for c in study.cells
        if c.status != "done"
    ]
    failed += [(name, "missing", why) for name, why in study.missing.items()]
    idle = dict.fromkeys((c.series, line) for c in study.cells for line in c.idle)
    title = "Runs that did not finish, and why"
    tables = [of_texts(f"{prefix}failed", title, ["run", "status", "why"], failed)]
    tables += [of_texts(f"{prefix}idle", "Settings that did nothing", ["series", "which"], idle)]
    made = [(c, each) for c in study.cells for each in c.stretches]
    title = "Runs whose steps were not all made alike"
    lines = [(study.name_of(c.folder), each.steps, each.made_by) for c, each in made]
    tables += [of_texts(f"{prefix}made", title, ["run", "steps", "made by"], lines)]
    return [each for each in tables if each.rows]


def _values(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _worded(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return "" if value is None else str(value)
