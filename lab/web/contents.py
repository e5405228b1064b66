"""Everything that a page says about its studies."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.analysis.charts import NothingToDraw
from lab.analysis.points import Difference, Point, differences, floor_text
from lab.analysis.records import CONTEXT, RecordedStudy, identity
from lab.analysis.results import Results, load
from lab.analysis.runs import timeline_of_run
from lab.analysis.summary import shared_runs
from lab.diagnosis.evidence import Evidence, gather, sweep_command
from lab.diagnosis.finding import Finding, finding
from lab.diagnosis.rules import judge, remedies
from lab.diagnosis.view import best_remedies, headline, in_full, time_split
from lab.draw.text import in_words, number_of, sentence
from lab.record.trace import TIMELINE, read_trace
from lab.settings.files import choices_of, read_file
from lab.settings.storage import DamagedFile, read_json
from lab.simulate.predict import DEFAULT_PROFILE
from lab.web.elements import (
    WIDTH,
    Drawing,
    Table,
    drawing,
    of_texts,
    percent_text,
    points_table,
)

CHARTS = ("speedup", "efficiency", "throughput", "step_time", "payload", "convergence")
HARDWARE = "emulated_1gbit"  # what a fit starts from, as in lab.score
MOST_SERIES = 40  # of a chart; more look alike
MOST_APART = 8  # settings by which two studies differ, told by name
MOST_TIMELINES = 8  # of a study: first repeats of as many breakdowns
ABOUT = {
    **{"model": "model {}", "data": "data {}", "device": "on {}"},
    **{"measured": "measured {}"},
}
MACHINE = {
    **{"hostname": "host", "cpu": "CPU", "num_cores": "cores", "memory_gib": "memory, GiB"},
    **{"gpus": "GPUs", "os": "OS", "python": "Python", "torch": "torch", "nccl": "NCCL"},
}


@dataclass
class Contents:
    """A study as a page shows it.

    Attributes:
        finding: what it found.
        about: what was run, on what and when, in a line.
        facts: the same in full, by name.
        notes: on reading tables and charts.
        helps: what would help the fastest point most, a change and why, the best first.
        explanations: why each point takes as long as it does: in a line, and in full.
        split: where the time of steps goes; None: nothing to explain.
        beyond: predicted on more ranks than were measured; None: nothing is known of the layers.
        charts: the first is the one to look at.
        left_out: what the study cannot show, and why.
        records: every record, as its file has it.
    """

    study: RecordedStudy
    points: Sequence[Point]
    noise_floor: float
    finding: Finding
    about: str
    facts: dict[str, str]
    notes: Sequence[str]
    tables: list[Table]
    charts: list[Drawing]
    timelines: list[Drawing]
    helps: Sequence[tuple[str, str]]
    explanations: Sequence[tuple[str, str]]
    records: list[dict[str, Any]]
    left_out: list[str]
    split: Drawing | None = None
    beyond: Drawing | None = None

    @property
    def drawings(self) -> list[Drawing]:
        """All charts, in no order."""
        more = (self.split, self.beyond)
        return [*self.charts, *self.timelines, *(each for each in more if each)]


@dataclass(frozen=True)
class OtherStudy:
    """The second study beside the first.

    Attributes:
        verdict: a sentence with counts.
        notes: what was not compared, settings and machines that differ, and both noise floors.
    """

    verdict: str
    notes: Sequence[str]
    table: Table


def contents_of(folder: Path, prefix: str) -> Contents:
    """Collect everything about the study in a folder.

    Args:
        prefix: begins the names of its tables and charts, which are unique on a page.

    Raises:
        ValueError: the study cannot be read.
    """
    results, left_out = load(folder), list[str]()
    study, points, floor = results.study, results.points, results.noise_floor
    explained = {e.point.place: (e, judge(e)) for e in _evidence(results, left_out)}
    found, facts = finding(points, floor, explained), _facts(study)
    why = explained.get(found.best.place) if found.best else None
    charts = _charts(results, prefix, left_out)
    notes = floor_text(floor), shared_runs(points)
    made = Contents(
        study=study,
        points=points,
        noise_floor=floor,
        finding=found,
        about=" · ".join(
            [
                facts["runs"] + " run" + "s" * (facts["runs"] != "1"),
                *(text.format(facts[key]) for key, text in ABOUT.items() if key in facts),
            ]
        ),
        facts=facts,
        notes=[sentence(note) for note in notes if note],
        tables=[points_table(points, floor, f"{prefix}points")],
        charts=charts,
        timelines=_timelines(study, prefix, left_out),
        helps=best_remedies(*why, points) if why else (),
        explanations=[
            (headline(e, verdict), in_full(e, remedies(e, verdict)))
            for e, verdict in explained.values()
        ],
        records=[read_json(c.folder / "record.json") for c in study.cells],
        left_out=left_out,
    )
    shown = [each.place for each in (found.best, found.baseline) if each]
    split = [explained[place][0] for place in shown if place in explained]
    for add in (_add_split, _add_predictions, _add_claims):
        try:
            add(made, prefix, split)
        except ValueError as reason:
            left_out.append(str(reason))
    made.tables += _troubles(study, prefix)
    if (number := len(results.looks)) > MOST_SERIES:
        left_out.append(f"charts by series: {number} series are too many to distinguish")
    return made


def _evidence(results: Results, left_out: list[str]) -> list[Evidence]:
    found = list[Evidence]()
    for point in results.points:
        try:
            found.append(gather(results, point.one))
        except DamagedFile as why:
            left_out.append(f"an explanation: {why}")
        except ValueError:  # a failed run, one rank, or no timed step: nothing to explain
            continue
    return found


def _charts(results: Results, prefix: str, left_out: list[str]) -> list[Drawing]:
    found = list[Drawing]()
    names = [(scaling, each) for each in CHARTS for scaling in results.scalings]
    names = [] if len(results.looks) > MOST_SERIES else names
    names[1:1] = [("strong", "map_of_strategies")] * results.has_map
    commands = {
        point.place: sweep_command(
            results.study, point.one, point.one.strategy, str(point.one.world_size)
        )
        for point in results.points
    }
    for scaling, name in names:
        try:
            chart = results.chart(name, scaling, WIDTH, commands)
            found.append(drawing(f"{prefix}{scaling}-{name}", chart))
        except NothingToDraw as why:
            left_out.append(f"{name.replace('_', ' ')}, {scaling} scaling: {why}")
    return found


def _timelines(study: RecordedStudy, prefix: str, left_out: list[str]) -> list[Drawing]:
    cells = [c for c in study.cells if c.repeat == 0 and (c.folder / TIMELINE).is_file()]
    charts = list[Drawing]()
    for number, cell in enumerate(cells[:MOST_TIMELINES]):
        ranks = number_of(cell.world_size, "rank")
        title = f"{cell.series} on {ranks}, batch {cell.batch_size}"
        try:
            chart = timeline_of_run(read_trace(cell.folder / TIMELINE), title, WIDTH)
            charts.append(drawing(f"{prefix}timeline-{number}", chart))
        except ValueError as why:
            left_out.append(f"a timeline: {why}")
    if len(cells) > MOST_TIMELINES:
        left_out.append(f"timelines: only the first {MOST_TIMELINES} of {len(cells)} are shown")
    return charts


def _facts(study: RecordedStudy) -> dict[str, str]:
    """List what was run, when and on what; values in which runs differ side by side."""
    cells = study.cells
    done = sum(cell.status == "done" for cell in cells)
    times = sorted(filter(None, (cell.record.started_at for cell in cells)))
    facts = {
        "runs": str(done) if done == len(cells) else f"{done} finished, of {len(cells)}",
        "measured": " to ".join(dict.fromkeys([times[0][:10], times[-1][:10]])) if times else "",
        "commits": _values(cell.commit[:10] or "changed files" for cell in cells),
    }
    for key in ("model", "data", "precision", "device"):
        facts[key] = _values(cell.settings.get(key, "") for cell in cells)
    for key, name in MACHINE.items():
        facts[name] = _values(_worded(cell.environment.get(key)) for cell in cells)
    return {key: text for key, text in facts.items() if text}


def _troubles(study: RecordedStudy, prefix: str) -> list[Table]:
    """Make tables of runs that failed, of settings without effect, and of steps others made."""
    several = [c for c in study.cells if c.world_size > 1]  # one rank exchanges nothing anyway
    idle = dict.fromkeys((c.series, line) for c in several for line in c.record.idle)
    title = "Runs that did not finish, and the reasons"
    tables = [of_texts(f"{prefix}failed", title, ["run", "status", "why"], study.troubles)]
    tables += [of_texts(f"{prefix}idle", "Settings without effect", ["series", "setting"], idle)]
    made = [(c, each) for c in study.cells for each in c.record.stretches]
    title = "Runs in which steps were executed in different ways"
    lines = [(study.name_of(c.folder), each.steps, each.made_by) for c, each in made]
    tables += [of_texts(f"{prefix}made", title, ["run", "steps", "made by"], lines)]
    return [each for each in tables if each.rows]


def _values(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _worded(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return "" if value is None else str(value)


def _add_split(to: Contents, prefix: str, several: Sequence[Evidence]) -> None:
    if several:
        to.split = drawing(f"{prefix}split", time_split(several, to.finding.names, WIDTH))


def _add_predictions(to: Contents, prefix: str, _: object) -> None:
    """Fit hardware to a study's cells of one and two ranks, predict all of its cells, and more."""
    if not any(cell.profile for cell in to.study.cells):
        return  # real layers, which only a profile of them would tell apart
    from lab.simulate.scorecard import beyond, of_study, rows_of

    files = (("profile", DEFAULT_PROFILE), ("hardware", HARDWARE))
    card = of_study(to.study.folder, *(read_file(group, name, None) for group, name in files))
    title = "Predicted and measured steps (errors of fitted cells say little about accuracy)"
    to.tables.append(of_texts(f"{prefix}predicted", title, *rows_of(card.cells)))
    to.beyond = drawing(f"{prefix}beyond", beyond(card, WIDTH))


def _add_claims(to: Contents, prefix: str, _: object) -> None:
    """Judge the published claims that the study measures, if there are claims of its name."""
    if to.study.name not in choices_of("claims"):
        return
    from lab.claims.findings import verify  # imports torch
    from lab.claims.page import table_of

    found = verify(to.study.name, to.study.folder)
    header, rows = table_of(found.verdicts)
    title = f"Published claims: {found.paper.title}"
    lines = [[claim, verdict, *rest] for claim, *rest, verdict in (header, *rows)]
    to.tables.append(of_texts(f"{prefix}claims", title, lines[0], lines[1:]))


def compare(first: Contents, second: Contents) -> OtherStudy:
    """Compare the points that two studies share."""
    known = [floor for floor in (first.noise_floor, second.noise_floor) if not math.isnan(floor)]
    found = differences(first.points, second.points, max(known, default=math.nan))
    names = [contents.study.folder.name for contents in (first, second)]
    floors = [
        f"noise floor of {name}: " + ("unknown" if math.isnan(floor) else f"{100 * floor:.1f} %")
        for name, floor in zip(names, (first.noise_floor, second.noise_floor), strict=True)
    ]
    alone = [
        f"{number_of(count, 'point')} of {name}"
        for name, each in zip(names, (first, second), strict=True)
        if (count := sum(p.num_repeats > 0 for p in each.points) - len(found))
    ]
    places = {each.point.place for each in found}
    apart = _apart(*([p for p in each.points if p.place in places] for each in (first, second)))
    notes = [
        f"Not compared, because the other study lacks them: {in_words(alone)}" if alone else "",
        f"The studies differ in {'; '.join(apart)}" if apart else "",
        "; ".join(floors),
    ]
    told = [sentence(note) for note in notes if note]
    return OtherStudy(_compared_text(found, *names), told, _differences_table(found, *names))


def _apart(first: Sequence[Point], second: Sequence[Point]) -> list[str]:
    """List the settings and machines by which the same points of two studies differ."""
    values = [_values_of(points) for points in (first, second)]
    shared = values[0].keys() & values[1].keys()
    differing = [key for key in shared if values[0][key] != values[1][key]]
    differing.sort(key=lambda key: (key not in CONTEXT, key))
    told = [
        f"{key}: {', '.join(values[0][key])} and {', '.join(values[1][key])}"
        for key in differing[:MOST_APART]
    ]
    rest = len(differing) - len(told)
    return [*told, number_of(rest, "more setting")] if rest else told


def _values_of(points: Sequence[Point]) -> dict[str, list[str]]:
    """Return all values of each setting, and of each fact that repeats share."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for cell in (cell for point in points for cell in point.cells):
        one = identity(cell.record)
        for key, value in {**one.resolved, **one.typed}.items():
            found[key].add(value)
    return {key: sorted(each) for key, each in found.items()}


def _compared_text(found: Sequence[Difference], first: str, second: str) -> str:
    if not found:
        return f"{first} and {second} have no measured point in common."
    counts = Counter(each.finding for each in found)
    parts = [
        f"{'has' if finding.startswith('too') else 'is'} {finding} at {number_of(count, 'point')}"
        for finding, count in sorted(counts.items())
    ]
    both = f"Both studies measured {number_of(len(found), 'point')}"
    return f"{both}. Compared with {first}, {second} {in_words(parts)}."


def _differences_table(found: Sequence[Difference], first: str, second: str) -> Table:
    rows = [
        [
            *(each.point.series, str(each.point.world_size), str(each.point.fixed_batch_size)),
            *(percent_text(each.ratio), str(each.num_pairs), each.finding),
        ]
        for each in found
    ]
    title = f"Steps of {second}, compared with {first}"
    header = ["series", "ranks", "batch", "step", "n", "finding"]
    return Table("differences", title, "The intervals hold for all rows jointly.", header, rows)
