"""A paper's claims, cells and crossings as tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lab.claims.claims import Claim, Paper
from lab.claims.metrics import Facts, MeasuredFacts
from lab.draw.looks import order


@dataclass(frozen=True)
class Scored:
    """A cell that was measured, and what was predicted of it.

    Attributes:
        measured_s: of each repeat.
        evidence: "fitted" if the model has seen it, "held out" if not.
    """

    strategy: str
    profile: str
    world_size: int
    batch_size: int
    measured_s: tuple[float, ...]
    predicted_s: float
    evidence: str

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the median of what was measured."""
        return self.predicted_s / median(self.measured_s) - 1


@dataclass(frozen=True)
class Crossings:
    """Where strategies begin to pay.

    Attributes:
        of: the profile and the hardware.
        world_size: of all.
        margin: how many times faster 1-bit has to be.
        batch: by strategy, the smallest global batch that is trained faster than on one rank.
        rate: by global batch, the rate in bytes per second below which 1-bit pays beside overlap.
    """

    of: str
    world_size: int
    margin: float
    batch: Mapping[str, int | None]
    rate: Mapping[int, float | None]


def claims_table(
    paper: Paper, predicted: Facts, measured: MeasuredFacts | None
) -> tuple[list[str], list[str]]:
    """A line for each claim, and the verdicts: by what was measured, if it was."""
    rows, verdicts = [], []
    for claim in paper.claims:
        guess, found = claim.value(predicted), claim.value(measured) if measured else None
        verdict = claim.check.verdict(guess if found is None else found)
        verdicts.append(verdict)
        what = [claim.says, claim.source, f"{claim.quantity.replace('_', ' ')} {claim.check}"]
        values = [_text(claim.published), _text(guess), _text(found) + _range(claim, measured)]
        by = "predicted" if found is None else "measured"
        rows.append([*what, *values, f"{verdict} ({by})"])
    header = ["claim", "where", "holds if", "published", "predicted", "measured", "verdict"]
    return markdown(header, rows), verdicts


def cells_table(cells: Sequence[Scored]) -> list[str]:
    """Every cell; where it was repeated, [lowest, highest]."""
    header = ["strategy", "profile", "N", "batch", "measured ms", "predicted ms", "error", "cell"]
    rows = [
        [
            *(cell.strategy, cell.profile, str(cell.world_size), str(cell.batch_size)),
            *(_milliseconds(cell.measured_s), f"{1e3 * cell.predicted_s:.1f}"),
            *(f"{100 * cell.error:+.1f} %", cell.evidence),
        ]
        for cell in sorted(cells, key=_order)
    ]
    return markdown(header, rows)


def errors(cells: Sequence[Scored]) -> str:
    """How far predictions are from the cells that they were not fitted to."""
    held_out = [abs(cell.error) for cell in cells if cell.evidence == "held out"]
    if not held_out:
        return "No cell was held out, so nothing says what the predictions are worth."
    middle, worst = 100 * median(held_out), 100 * max(held_out)
    return (
        f"{len(held_out)} held-out cells: median error {middle:.1f} %, worst {worst:.1f} % "
        "(of the absolute value)."
    )


def crossings_table(crossings: Crossings) -> list[str]:
    """Both kinds."""
    N, percent = crossings.world_size, f"{100 * (crossings.margin - 1):.0f} %"
    batches = [
        [name, "never" if batch is None else str(batch)] for name, batch in crossings.batch.items()
    ]
    rates = [
        [str(batch), "no rate" if rate is None else f"{8e-9 * rate:.3g} Gb/s"]
        for batch, rate in crossings.rate.items()
    ]
    return [
        *markdown(["strategy", f"{N} ranks are faster than one from global batch"], batches),
        "",
        *markdown(
            ["global batch", f"on {N} ranks, 1-bit is {percent} faster than overlap below"], rates
        ),
        "",
        f"Predicted, of {crossings.of}.",
    ]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _order(cell: Scored) -> tuple[object, ...]:
    return cell.profile, cell.batch_size, cell.world_size, order(cell.strategy)


def _milliseconds(repeats_s: Sequence[float]) -> str:
    """The median, and if there are several the lowest and the highest."""
    text = f"{1e3 * median(repeats_s):.1f}"
    if len(repeats_s) == 1:
        return text
    return f"{text} [{1e3 * min(repeats_s):.1f}, {1e3 * max(repeats_s):.1f}]"


def _range(claim: Claim, measured: MeasuredFacts | None) -> str:
    """The lowest and the highest value of repeats, where these differ."""
    values = [claim.value(repeat) for repeat in measured.repeats()] if measured else []
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return ""
    return f" [{_text(min(known))}, {_text(max(known))}]"


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
