"""Write findings as tables, as a page with its figures, and as CSV."""

from __future__ import annotations

import csv
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lab.claims.claims import Reproduction
from lab.claims.device import mini_batches_table
from lab.claims.findings import (
    BASES,
    EVIDENCE,
    KINDS,
    OTHERS,
    SURE,
    UNTESTED,
    ClaimVerdict,
    Findings,
    Reproduced,
    tally,
)
from lab.claims.metrics import of_linear_scaling
from lab.claims.predicted import MARGIN, Predicted, crossovers, speedup_map
from lab.draw.chart import order
from lab.draw.text import in_words, markdown, number_of, plain
from lab.settings.storage import write_atomically, write_text
from lab.simulate.score import ScoredCell, held_out, score, skill

if TYPE_CHECKING:
    from lab.draw.chart import Chart

LINEAR = "error of linear scaling"  # the null model: N ranks are N times as fast
OUTCOMES = (
    'The verdict is "disagrees" if our value is outside the range that the claim allows. Either '
    'the claim or our value may be wrong. The verdict is "undecided" if only part of our value\'s '
    "interval is inside the range."
)
SKILL = (
    "Linear scaling means that N ranks are N times as fast as one. The skill is 1 − (cost model's "
    "error / linear scaling's error)."
)


def printed(papers: Mapping[str, Findings]) -> str:
    """Write what a command prints: Markdown, or on a terminal plain tables of what is evidence."""
    first, *others = papers.values()
    is_terminal = sys.stdout.isatty()
    if others:
        lines = overview(papers)
    else:
        lines = summary(first, EVIDENCE if is_terminal else (*KINDS,))
        left_out = sum(each.kind not in EVIDENCE for each in first.verdicts)
        if is_terminal and left_out:
            claims = number_of(left_out, "claim")
            lines += ["", f"out=page.md also lists the {claims} that we do not count."]
    return "\n".join(plain(lines) if is_terminal else lines)


def summary(findings: Findings, kinds: Collection[str] = (*KINDS,)) -> list[str]:
    """List the first lines of the page: the title, the table of claims, and its sources.

    Args:
        kinds: of the claims to list.
    """
    paper, conditions = findings.paper, findings.conditions
    head = [f"# {paper.title}", ""]
    if conditions and conditions.commits:
        many = "s" if len(conditions.commits) > 1 else ""
        at = f"at commit{many} {in_words(conditions.commits)}"
        head += [f"The cells (runs with one combination of settings) were measured {at}.", ""]
    elif conditions:
        head += ["The commit is unknown, so the measurements may be older than the code.", ""]
    scaling = _sources_of_scaling(findings) if paper.profile else []
    device = list(_sources_of_device(findings))
    sources = [*scaling, *([""] if scaling and device else []), *device]
    table = ["", *mini_batches_table(findings.mini_batches)] if findings.mini_batches else []
    return [*head, *claims_tables(findings.verdicts, kinds), "", *sources, *table]


def overview(papers: Mapping[str, Findings]) -> list[str]:
    """List what verdicts rest on and how they came out, then a line for each paper."""
    every = [verdict for found in papers.values() for verdict in found.verdicts]
    of_all = tally(every)
    bases = [key for key in BASES if key not in UNTESTED and sum(of_all[key].values())]
    rows = [[name, *_agreeing(found.verdicts, bases)] for name, found in papers.items()]
    others = [several.removeprefix("of ") for _, several in OTHERS.values()]
    return [
        *verdicts_table(every),
        "",
        "The next table shows, for each source, how many of the claims that count as evidence "
        "agree with our values. The last three columns give the numbers of claims that do not "
        "count as evidence.",
        "",
        *markdown(["source", *bases, "not tested", *others], rows),
    ]


def verdicts_table(verdicts: Sequence[ClaimVerdict]) -> list[str]:
    """Write what decides verdicts, and how those that are evidence came out; nothing is summed."""
    header = ["how a claim was checked", "claims", "agree", "disagree", "undecided", "median error"]
    rows, skills = [], _skill(verdicts)
    for basis, counts in tally(verdicts).items():
        outcomes = [counts[key] for key in ("holds", "fails", "within noise")]
        cells = [str(number) if basis not in UNTESTED else "–" for number in outcomes]
        if number := sum(counts.values()):
            far = "; ".join(skills) if basis == "predicted" else ""
            rows.append([BASES[basis], str(number), *cells, far or "–"])
    kinds = Counter(verdict.kind for verdict in verdicts)
    others = [
        f"{kinds[key]} {several if kinds[key] > 1 else one}"
        for key, (one, several) in OTHERS.items()
        if kinds[key]
    ]
    none = "None of the claims below counts as evidence about its source."
    lines = markdown(header, rows) if rows else [none]
    if rows:
        has_skill = any("skill" in row[-1] for row in rows)
        lines += ["", f"{OUTCOMES} {SKILL}" if has_skill else OUTCOMES]
    return [*lines, "", f"We do not count {in_words(others)} as evidence."] if others else lines


def _agreeing(verdicts: Sequence[ClaimVerdict], bases: Sequence[str]) -> list[str]:
    """Write how many claims of a source agree, by what decides; then those that are no evidence."""
    counts, kinds = tally(verdicts), Counter(verdict.kind for verdict in verdicts)
    untested = sum(sum(counts[basis].values()) for basis in UNTESTED)
    known = ((counts[key]["holds"], sum(counts[key].values())) for key in bases)
    cells = [f"{holds} of {number}" if number else "–" for holds, number in known]
    return cells + [str(number or "–") for number in (untested, *(kinds[key] for key in OTHERS))]


def write(papers: Mapping[str, Findings], path: Path, command: str) -> None:
    """Write the page of one paper or several; figures and values go into the folder of its name.

    Args:
        path: path of the page, in Markdown.
        command: the command that generates the page.

    Raises:
        OSError: a file cannot be written.
    """
    first, *others = papers.values()
    content = _of_several(papers, path) if others else _of_one(first, path, command)
    write_lines(path, [*content, *(made_by(command) if others else ())])


def _of_one(findings: Findings, path: Path, command: str) -> list[str]:
    figures, lines = path.with_suffix(""), [*summary(findings), *made_by(command)]
    figures.mkdir(exist_ok=True)
    heads = {"finding": "the finding", "claims": "claims", "mini_batches": "seconds per mini-batch"}
    for chart in _charts(findings):
        chart.write(figures / chart.name, ["png"])
        if chart.name in heads:
            lines += ["", f"![{heads[chart.name]}]({path.stem}/{chart.name}.png)"]
    write_csv(figures / "claims.csv", CLAIM, [_claim_values(each) for each in findings.verdicts])
    if findings.reproduced:
        scored = findings.reproduced.scored or ()
        rows = [row for cell in scored for row in _cell_values(cell)]
        write_csv(figures / "cells.csv", CELL, rows)
        lines += _sections(findings.reproduced, path.stem)
    return lines


def _of_several(papers: Mapping[str, Findings], path: Path) -> list[str]:
    from lab.claims.figures import verdicts  # with Altair

    every = [verdict for found in papers.values() for verdict in found.verdicts]
    lines = ["# Predicted and published", "", *overview(papers)]
    titles = [f"{name}: {found.paper.title}" for name, found in papers.items()]
    if chart := verdicts(every, titles):
        figures = path.with_suffix("")
        figures.mkdir(exist_ok=True)
        chart.write(figures / chart.name, ["png"])
        lines += ["", f"![claims]({path.stem}/{chart.name}.png)"]
    for found in papers.values():
        title, *rest = summary(found)
        lines += ["", f"#{title}", *rest]
    return lines


def made_by(command: str) -> list[str]:
    """List the lines of a page that say how to make it again."""
    return ["", "This command generates the page:", "", f"    {command}"]


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write a page. OSError: it cannot be written."""
    text = "\n".join(lines) + "\n"
    write_text(path, text)


def _charts(findings: Findings) -> list[Chart]:
    """Draw the figures of a page."""
    # With Altair, which the table of claims alone does not need.
    from lab.analysis.charts import emulation_text
    from lab.claims import figures

    paper, conditions, found = findings.paper, findings.conditions, findings.reproduced
    title = paper.title
    charts: list[Chart] = []
    emulations = conditions.emulations if conditions else ()
    emulated = [f"measured, emulated: {emulation_text(emulations)}"] if emulations else []
    basis = f"; predicted: profile {paper.profile} on {paper.hardware}" if paper.profile else ""
    if made := figures.verdicts(findings.verdicts, [f"{title}{basis}", *emulated]):
        charts.append(made)
    if findings.mini_batches:
        charts.append(figures.mini_batches(findings.mini_batches, [title]))
    if found and found.scored and (made := figures.finding(found.scored, found, title)):
        charts.append(made)
    if found:
        by_paper, by_study = (f"{title}; predicted: {each}" for each in (found.paper, found.study))
        charts += [
            figures.speedup_bars(found, [by_study, *emulated]),
            figures.speedup_over_rate(found, [by_paper]),
            figures.regime_map(
                speedup_map(found.grid, found.study), [f"{by_study}, each rank on its own cores"]
            ),
        ]
    return charts


def _sections(reproduced: Reproduced, folder: str) -> Iterator[str]:
    yield from ("", "## Speedup", "", f"![speedup]({folder}/speedup.png)")
    if reproduced.scored is not None:
        yield from ("", "## Every cell", "")
        yield (
            "Each row of the table is a cell: one combination of strategy, profile, number of "
            "ranks (N) and batch size."
        )
        yield "The hardware parameters are fitted to the cells on one and two ranks."
        yield from (errors(reproduced.scored), "")
        yield from cells_table(reproduced.scored)
    yield from ("", "## Where each strategy pays off", "")
    for predicted in (reproduced.paper, reproduced.study):
        yield from (*crossovers_tables(reproduced.grid, predicted), "")
    yield from (f"![bandwidth]({folder}/bandwidth.png)", "", f"![regimes]({folder}/regimes.png)")


def _sources_of_scaling(findings: Findings) -> list[str]:
    paper = findings.paper
    predicted = (
        f"These predictions use the profile {paper.profile} and the hardware file "
        f"{paper.hardware}, without fitted parameters. Brackets after a prediction give the lowest "
        "and highest prediction over the ranges assumed in the hardware file."
    )
    if findings.conditions:
        machines = "; ".join(findings.conditions.machines)
        emulations = [f"* {each}" for each in findings.conditions.emulations]
        head = "The cluster was emulated as follows:"
        listed = [head, "", *emulations, ""] if emulations else []
        brackets = "Brackets after a measured value give the 95 % interval over repeats. The "
        brackets += "verdict on a measured claim depends on this interval."
        model = f"`model={paper.model}`"
        counted = f"The parameter counts are those of {model}. They are larger than those of the "
        counted += "model that the measurements replayed."
        measured = f"The measurements ran on {machines}."
        return [predicted, "", measured, *listed, f"{brackets} {counted}"]
    if not paper.reproduction:
        return [predicted]
    study = paper.reproduction.study
    how = f"Run `python -m lab.sweep study={study}` as root, and then run the command of this page"
    return [predicted, f"Nothing has been measured yet. {how} with `runs=runs/{study}`."]


def _sources_of_device(findings: Findings) -> Iterator[str]:
    """Name the results that claims about one device were checked against, or how to get them."""
    paper, device = findings.paper, findings.device
    found = device.results()
    if found:
        yield (
            "If a value is the ratio of two measured values, its interval is the widest that "
            "their two intervals allow. The measured values come from these benchmark results:"
        )
        yield ""
    for name, result in found.items():
        where, commit = result["environment"], result["git_commit"] or {}
        machine = f"{where['cpu']}, torch {where['torch']}, commit {commit.get('commit')}"
        yield f"* `{name}` ({machine}): `{result['command']}`"
    missing = [name for name in paper.benches if name not in found]
    if missing:
        run = "To measure the missing results, run these commands. Then run the command of this "
        yield from ("", f"{run}page with `benches=FOLDER`.", "")
    for name in missing:
        yield f"* `python -m lab.bench {paper.benches[name]} out=FOLDER/{name}.json`"
    if paper.study and device.cells:
        where = device.environments
        machines = sorted({f"{each['cpu']}, torch {each['torch']}" for each in where})
        yield f"The cells of `study={paper.study}` were measured on {'; '.join(machines)}."
    elif paper.study:
        study = paper.study
        yield f"Nothing has been measured yet. Run `python -m lab.sweep study={study}`, and then"
        yield f"run the command of this page with `runs=runs/{study}`."


def claims_tables(
    verdicts: Sequence[ClaimVerdict], kinds: Collection[str] = (*KINDS,)
) -> list[str]:
    """Write how verdicts came out, and a table for each of some kinds of claim."""
    lines = [*verdicts_table(verdicts), ""]
    for kind, meaning in KINDS.items():
        found = [verdict for verdict in verdicts if verdict.kind == kind]
        if found and kind in kinds:
            lines += [f"**{kind}**: {meaning}", "", *markdown(*table_of(found)), ""]
            lines += _conditions(found)
    return lines[:-1]


def _skill(verdicts: Sequence[ClaimVerdict]) -> list[str]:
    """Compare predictions of published figures of scaling with the null model.

    Figures on which both agree count too, though such claims are no evidence: leaving them out
    would choose figures by how they came out.
    """
    errors = [
        (
            abs(each.predicted / (each.claim.published or 1) - 1),
            abs(linear / (each.claim.published or 1) - 1),
        )
        for each in verdicts
        if each.claim.is_figure and each.predicted is not None
        if each.kind == "predicted" or each.why == SURE  # no figure twice
        if (linear := _of_linear(each)) is not None
    ]
    if not errors:
        return []
    predicted, linear = map(median, zip(*errors, strict=True))
    gained = f"skill {skill(predicted, linear):.2f}" if linear else "the skill is undefined"
    return [
        f"linear scaling {100 * linear:.1f} %, cost model {100 * predicted:.1f} % "
        f"({len(errors)} scaling figures); {gained}"
    ]


def _conditions(verdicts: Sequence[ClaimVerdict]) -> list[str]:
    """List what sources leave open, and how many cells a grid has."""
    lines = []
    for claim in (verdict.claim for verdict in verdicts):
        cells = f"The grid has {len(list(claim.grid.cells))} cells. " if claim.grid else ""
        if cells or claim.conditions:
            lines.append(f"* {claim.says}: {cells}{claim.conditions}".rstrip())
    return [*lines, ""] if lines else []


def table_of(verdicts: Sequence[ClaimVerdict]) -> tuple[list[str], list[list[str]]]:
    """Return the header of a table of claims, and a line for each.

    Where one is on scaling, a column has the error of linear scaling.
    """
    counted = all(each.basis == "counted" for each in verdicts)
    lines = [_claim_line(each, "counted" if counted else "predicted") for each in verdicts]
    header = [key for key in lines[0] if key != LINEAR or any(line[key] != "–" for line in lines)]
    return header, [[line[key] for key in header] for line in lines]


def _of_linear(verdict: ClaimVerdict) -> float | None:
    claim = verdict.claim
    return of_linear_scaling(claim.quantity, claim.at) if claim.published else None


def cells_table(cells: Sequence[ScoredCell]) -> list[str]:
    """Write a line for each cell; where it was repeated, [lowest, highest] follows the median."""
    header = ["strategy", "profile", "N", "batch", "measured ms", "predicted ms", "error", "cell"]
    rows = []
    for cell in sorted(
        cells, key=lambda c: (c.profile, c.batch_size, c.world_size, order(c.strategy))
    ):
        repeats_s, median_s = cell.measured_s, f"{1e3 * median(cell.measured_s):.1f}"
        if len(repeats_s) > 1:
            median_s += f" [{1e3 * min(repeats_s):.1f}, {1e3 * max(repeats_s):.1f}]"
        where = cell.strategy, cell.profile, str(cell.world_size), str(cell.batch_size)
        predicted_ms = f"{1e3 * cell.predicted_s:.1f}"
        rows.append([*where, median_s, predicted_ms, _percent(cell.error), cell.evidence])
    return markdown(header, rows)


def errors(cells: Sequence[ScoredCell]) -> str:
    """Summarise the errors of predictions on cells that they were not fitted to."""
    found = score(held_out(cells))
    if not found.num_cells:
        return "No cell was held out, so the accuracy of the predictions is unknown."
    return found.in_sentences()


def crossovers_tables(grid: Reproduction, predicted: Predicted) -> list[str]:
    """Write a table of batches, and one of link rates if two strategies are compared."""
    world_size, (batches, rates) = max(grid.world_sizes), crossovers(grid, predicted)
    header = ["strategy", f"smallest global batch at which {world_size} ranks are faster than one"]
    rows = [[name, "never" if size is None else str(size)] for name, size in batches.items()]
    lines = [*markdown(header, rows), ""]
    if grid.rate_crossover:
        (first, second), percent = grid.rate_crossover, f"{100 * (MARGIN - 1):.0f} %"
        where = (
            f"link rate below which {first} is at least {percent} faster than {second} on "
            f"{world_size} ranks"
        )
        rows = [
            [str(batch), "no rate" if rate is None else f"{8e-9 * rate:.3g} Gb/s"]
            for batch, rate in rates.items()
        ]
        lines += [*markdown(["global batch", where], rows), ""]
    return [*lines, f"These values are predicted with {predicted}."]


def _claim_line(verdict: ClaimVerdict, computed: str) -> dict[str, str]:
    """Write a line by columns; in the one named `computed` is what was predicted, or counted."""
    claim, linear = verdict.claim, _of_linear(verdict)
    quantity = claim.quantity.replace("_", " ")
    return {
        "claim": claim.says,
        "where": claim.source,
        "holds if": f"{quantity}{' (as a ratio)' if claim.over else ''} {claim.check}",
        "published": _text(claim.published),
        computed: _predicted(verdict),
        # By how much the value that decides misses the published figure.
        "error": _percent(verdict.miss if claim.published else None),
        LINEAR: _percent(None if linear is None else linear / (claim.published or 1) - 1),
        "measured": _measured(verdict),
        "verdict": f"{verdict.words} ({verdict.why})" if verdict.why else verdict.words,
    }


def _predicted(verdict: ClaimVerdict) -> str:
    """Write the prediction, and in brackets what its hardware's assumptions make of it."""
    text, ends = _text(verdict.predicted), [*map(_text, verdict.predicted_ends or ())]
    return f"{text} [{', '.join(ends)}]" if len(set(ends)) > 1 else text


def _measured(verdict: ClaimVerdict) -> str:
    """Write the value and its interval, or how few repeats gave none."""
    value = verdict.measured
    if math.isnan(value.mid):
        return "–"
    if math.isnan(value.lo):
        few = "" if verdict.kind == "counted" else f" (n = {verdict.num_repeats})"
        return f"{_text(value.mid)}{few}"
    interval = "" if value.lo == value.hi else f" [{_text(value.lo)}, {_text(value.hi)}]"
    return f"{_text(value.mid)}{interval}"


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+z.1f} %"


CLAIM = ("claim", "kind", "why", "where", "quantity", "published", "predicted", "predicted_lo")
CLAIM += ("predicted_hi", "measured", "measured_lo", "measured_hi", "num_repeats", "verdict")
CELL = ("conditions", "strategy", "profile", "world_size", "batch_size", "evidence")
CELL += ("repeat", "measured_s", "predicted_s", "measured_exposed_s", "predicted_exposed_s")


def _claim_values(verdict: ClaimVerdict) -> list[object]:
    claim, measured = verdict.claim, verdict.measured
    return [
        *(claim.says, verdict.kind, verdict.why, claim.source, claim.quantity, claim.published),
        *(verdict.predicted, *(verdict.predicted_ends or (None, None))),
        *(measured.mid, measured.lo, measured.hi, verdict.num_repeats, verdict.words),
    ]


def _cell_values(cell: ScoredCell) -> list[list[object]]:
    """Return a line for each repeat, in seconds of a step; exposed: of the median over repeats."""
    where = cell.conditions, cell.strategy, cell.profile, cell.world_size, cell.batch_size
    return [
        [*where, cell.evidence, repeat, seconds, cell.predicted_s, *cell.exposed_s]
        for repeat, seconds in enumerate(cell.measured_s)
    ]


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write numbers to seven digits, and nothing for what is not known. OSError: it cannot."""

    def field(value: object) -> object:
        if isinstance(value, float):
            return f"{value:.7g}" if math.isfinite(value) else None
        return value

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            writer.writerows([field(value) for value in row] for row in rows)

    write_atomically(path, write)
