"""The parts of a step at each point of a study, as stacked bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.analysis.sheet import NothingToDraw, Sheet, repeats
from lab.analysis.speedup import CEILING, Row
from lab.draw.looks import BLUE, GREEN, GREY, SKY, VERMILLION
from lab.measure.intervals import Interval
from lab.measure.spans import PHASES

PHASE_LOOKS: dict[str, str] = dict(zip(PHASES, (GREY, SKY, BLUE, VERMILLION, GREEN), strict=True))


CEILING_PART, EXPOSED_PART = "step of none (ceiling)", "exposed exchange"


WHOLE_PART = "whole step: no run of\nnone on its model"


PART_LOOKS = {
    CEILING_PART: BLUE,
    EXPOSED_PART: VERMILLION,
    WHOLE_PART: "#C8C8C8",
}


@dataclass(frozen=True)
class Bar:
    """The parts of one bar in seconds, by name, and the interval of its end where known."""

    row: Row
    parts: dict[str, float]
    end: Interval | None


@dataclass(frozen=True)
class StackedBars:
    """Bars of one figure, with the colours of their parts by name, and what a bar is made from."""

    bars: tuple[Bar, ...]
    colours: dict[str, str]
    title: str
    sample: str


def stacked_bars(sheet: Sheet) -> StackedBars:
    """Compute the bars of `step_time`.

    Raises:
        NothingToDraw: as there.
    """
    if any(row.phases_s for row in sheet.rows):
        bars = tuple(_phase_bar(row) for row in sheet.rows if row.phases_s)
        title = f"Step time by phase (breakdown runs), {sheet.scaling} scaling"
        return StackedBars(bars, PHASE_LOOKS, title, _breakdowns(bars))
    bars = tuple(_exposed_bar(row) for row in sheet.measured())
    if not any(CEILING_PART in bar.parts for bar in bars):
        raise NothingToDraw("no breakdown run, and no run of none to compare with")
    title = (
        "Step time as the step of none (ceiling) plus the exposed exchange (throughput runs), "
        f"{sheet.scaling} scaling"
    )
    return StackedBars(bars, PART_LOOKS, title, repeats(bar.row for bar in bars))


def _phase_bar(row: Row) -> Bar:
    return Bar(row, dict(row.phases_s), None)


def _exposed_bar(row: Row) -> Bar:
    exposed = row.exposed_exchange_s
    if row.strategy == CEILING:
        return Bar(row, {CEILING_PART: row.step_s}, None)
    if math.isnan(exposed.mid):
        return Bar(row, {WHOLE_PART: row.step_s}, None)
    # A strategy may come out faster than the ceiling by noise: the bar then ends at its own step.
    shown = max(0.0, exposed.mid)
    ceiling = row.step_s - shown
    end = Interval(*(row.step_s - exposed.mid + e for e in (exposed.lo, exposed.mid, exposed.hi)))
    return Bar(row, {CEILING_PART: ceiling, EXPOSED_PART: shown}, end)


def _breakdowns(bars: Sequence[Bar]) -> str:
    counts = sorted({bar.row.num_breakdowns for bar in bars})
    return f"medians of n = {' to '.join(map(str, counts))} runs, no intervals"
