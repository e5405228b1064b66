"""Write findings as tables in Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from lab.claims.claims import EVIDENCE, KINDS, OUTCOMES
from lab.claims.crossovers import Crossovers
from lab.claims.terms import Terms
from lab.claims.verdicts import Verdict, tally
from lab.draw.looks import order
from lab.draw.text import markdown
from lab.simulate.score import ScoredCell, held_out, score


def claims_tables(verdicts: Sequence[Verdict]) -> list[str]:
    """Write a table for each kind of claim, and what those that are evidence come to."""
    lines: list[str] = []
    for kind, meaning in KINDS.items():
        found = [verdict for verdict in verdicts if verdict.claim.kind == kind]
        if found:
            rows = [claim_line(verdict) for verdict in found]
            lines += [f"**{kind}** ({meaning}):", "", *markdown(header_of(found), rows), ""]
            lines += _conditions(found)
    counts = ", ".join(f"{outcome} {n}" for outcome, n in tally(verdicts).items() if n)
    evidence = f"Of the claims that are evidence ({' and '.join(EVIDENCE)})"
    return [*lines, f"{evidence}: {counts or 'there are none'}."]


def _conditions(verdicts: Sequence[Verdict]) -> list[str]:
    """List what sources leave open, and how many cells a grid has."""
    lines = []
    for claim in (verdict.claim for verdict in verdicts):
        cells = f"{len(list(claim.grid.cells))} cells. " if claim.grid else ""
        if cells or claim.conditions:
            lines.append(f"* {claim.says}: {cells}{claim.conditions}".rstrip())
    return [*lines, ""] if lines else []


def overview(papers: Sequence[tuple[str, Sequence[Verdict]]]) -> list[str]:
    """Write a line for each paper: its claims by kind, and what those that are evidence come to."""
    header = ["paper", *KINDS, *OUTCOMES]
    rows = [[name, *map(str, _numbers(verdicts))] for name, verdicts in papers]
    every = [verdict for _, verdicts in papers for verdict in verdicts]
    total = ["**all**", *map(str, _numbers(every))]
    return markdown(header, [*rows, total])


def _numbers(verdicts: Sequence[Verdict]) -> list[int]:
    kinds = Counter(verdict.claim.kind for verdict in verdicts)
    return [*(kinds[kind] for kind in KINDS), *tally(verdicts).values()]


def header_of(verdicts: Sequence[Verdict]) -> list[str]:
    computed = "counted" if all(each.claim.is_counted for each in verdicts) else "predicted"
    header = ["claim", "where", "holds if", "published", computed, "error", "measured"]
    return [*header, "verdict"]


def terms_table(terms: Terms) -> list[str]:
    """Write each figure as predicted by the preset, by fitted terms, and by those of others."""
    fitted = ", ".join(f"{name} = {value:.3g}" for name, value in terms.values.items())
    ways = ("preset", "fitted", "left_out")
    header = ["claim", "published", "preset", "error", "fitted", "error", "left out", "error"]
    rows = [
        [
            each.claim.says,
            _text(each.published),
            *(text for way in ways for text in _way(getattr(each, way), each.published)),
        ]
        for each in terms.figures
    ]
    errors = [
        f"**median {100 * m:.1f} %, worst {100 * w:.1f} %**" for m, w in map(terms.error, ways)
    ]
    total = ["**all, absolute**", "", *(cell for error in errors for cell in ("", error))]
    return [
        f"Fitted: {fitted}. Left out: the terms are fitted to the other networks alone.",
        "",
        *markdown(header, [*rows, total]),
    ]


def _way(value: float, published: float) -> tuple[str, str]:
    return _text(value), f"{100 * (value / published - 1):+.1f} %"


def cells_table(cells: Sequence[ScoredCell]) -> list[str]:
    """Write a line for each cell; where it was repeated, [lowest, highest] follows the median."""
    header = ["strategy", "profile", "N", "batch", "measured ms", "predicted ms", "error", "cell"]
    return markdown(header, [_cell(cell) for cell in sorted(cells, key=_place)])


def errors(cells: Sequence[ScoredCell]) -> str:
    """Summarise the errors of predictions on cells that they were not fitted to."""
    found = score(held_out(cells))
    if not found.num_cells:
        return "No cell was held out, so nothing says what the predictions are worth."
    return f"Held out: {found}."


def crossovers_tables(crossovers: Crossovers) -> list[str]:
    """Write a table of batches, and one of link rates if two strategies are compared."""
    world_size = crossovers.world_size
    batches = [
        [name, "never" if batch is None else str(batch)] for name, batch in crossovers.batch.items()
    ]
    header = ["strategy", f"{world_size} ranks are faster than one from global batch"]
    return [
        *(*markdown(header, batches), ""),
        *_rates_table(crossovers),
        f"Predicted, of {crossovers.basis}.",
    ]


def _rates_table(crossovers: Crossovers) -> list[str]:
    if not crossovers.pair:
        return []
    (first, second), percent = crossovers.pair, f"{100 * (crossovers.margin - 1):.0f} %"
    rates = [
        [str(batch), "no rate" if rate is None else f"{8e-9 * rate:.3g} Gb/s"]
        for batch, rate in crossovers.rate.items()
    ]
    where = f"on {crossovers.world_size} ranks, {first} is {percent} faster than {second} below"
    return [*markdown(["global batch", where], rates), ""]


def claim_line(verdict: Verdict) -> list[str]:
    claim = verdict.claim
    quantity = claim.quantity.replace("_", " ")
    condition = f"{quantity}{', as a ratio,' if claim.over else ''} {claim.check}"
    known = verdict.outcome != "unknown" or not claim.of_device
    return [
        *(claim.says, claim.source, condition),
        *(_text(claim.published), _predicted(verdict), _error(verdict), _measured(verdict)),
        f"{verdict.outcome} ({verdict.evidence})" if known else verdict.outcome,
    ]


def _predicted(verdict: Verdict) -> str:
    """Write the prediction, and in brackets what its hardware's assumptions make of it."""
    text, ends = _text(verdict.predicted), verdict.predicted_ends
    if not ends or _text(ends[0]) == _text(ends[1]):
        return text
    return f"{text} [{_text(ends[0])}, {_text(ends[1])}]"


def _error(verdict: Verdict) -> str:
    """Write by how much the value that decides misses the published figure."""
    published = verdict.claim.published
    value = verdict.measured.mid if verdict.evidence == "measured" else verdict.predicted
    if not published or value is None:
        return "–"
    return f"{100 * (value / published - 1):+.1f} %"


def _measured(verdict: Verdict) -> str:
    """Write the value and its interval, or how few repeats gave none."""
    value = verdict.measured
    if math.isnan(value.mid):
        return "–"
    if math.isnan(value.lo):
        few = "" if verdict.claim.kind == "count" else f" (n = {verdict.num_repeats})"
        return f"{_text(value.mid)}{few}"
    interval = "" if value.lo == value.hi else f" [{_text(value.lo)}, {_text(value.hi)}]"
    return f"{_text(value.mid)}{interval}"


def _place(cell: ScoredCell) -> tuple[object, ...]:
    return cell.profile, cell.batch_size, cell.world_size, order(cell.strategy)


def _cell(cell: ScoredCell) -> list[str]:
    return [
        *(cell.strategy, cell.profile, str(cell.world_size), str(cell.batch_size)),
        *(_milliseconds(cell.measured_s), f"{1e3 * cell.predicted_s:.1f}"),
        *(f"{100 * cell.error:+.1f} %", cell.evidence),
    ]


def _milliseconds(repeats_s: Sequence[float]) -> str:
    """Write the median, and if there are several values the lowest and the highest."""
    text = f"{1e3 * median(repeats_s):.1f}"
    if len(repeats_s) == 1:
        return text
    return f"{text} [{1e3 * min(repeats_s):.1f}, {1e3 * max(repeats_s):.1f}]"


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
