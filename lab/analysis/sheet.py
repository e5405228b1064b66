"""The data of a study's figures and pages: its rows, as series and batches are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lab.analysis.records import Study
from lab.analysis.speedup import CEILING, Row
from lab.draw.looks import Look, order
from lab.draw.page import SCREEN, Page
from lab.measure.intervals import ENOUGH_REPEATS


class NothingToDraw(ValueError):
    """Raised if a figure's data are missing; the text says which."""


@dataclass(frozen=True)
class Sheet:
    """The data of one set of figures: the rows of one scaling of a study.

    Attributes:
        floor: the study's noise floor (lab.analysis.noise); NaN if unknown.
    """

    study: Study
    scaling: str
    rows: tuple[Row, ...]
    looks: dict[str, Look]
    floor: float = math.nan
    page: Page = SCREEN

    def measured(self) -> list[Row]:
        """Select the rows with throughput runs.

        Raises:
            NothingToDraw: there are none.
        """
        rows = [row for row in self.rows if row.num_repeats]
        if not rows:
            raise NothingToDraw("no finished throughput run")
        return rows

    def from_one_rank(self) -> list[Row]:
        """Select the same, and for each series the shared run of one rank, if it has no other.

        Raises:
            NothingToDraw: there are none.
        """
        rows = self.measured()
        ones = {(r.series, r.fixed_batch_size): r for r in rows if r.world_size == 1}
        lacking = {
            (row.series, row.fixed_batch_size): row
            for row in rows
            if row.one_rank not in ("", row.series)
        }
        shared = [
            replace(ones[row.one_rank, batch_size], series=series, strategy=row.strategy)
            for (series, batch_size), row in lacking.items()
        ]
        return [*shared, *rows]

    def batch_name(self) -> str:
        """Name the batch size that this scaling keeps."""
        return "global batch" if self.scaling == "strong" else "per-rank batch"

    def label(self, series: str) -> str:
        """Name the series for a legend, with its difference from the others."""
        row = next(row for row in self.rows if row.series == series)
        if row.strategy == CEILING:
            return f"{series} (ceiling)"
        return f"{series} (another model)" if row.transform else series

    def learns(self) -> bool:
        """Return whether there is something to learn from the study's data."""
        return any(cell.settings.get("data") != "synthetic" for cell in self.study.cells)

    def emulated(self) -> list[str]:
        """Describe the emulation of the emulated rows."""
        return sorted({row.emulation for row in self.rows} - {""})


def series_of(rows: Iterable[Row]) -> list[str]:
    """List the distinct series in reading order."""
    return sorted({row.series for row in rows}, key=order)


def repeats(rows: Iterable[Row]) -> str:
    """Describe the number of repeats behind the throughput of `rows`, and their intervals."""
    counts = sorted({row.num_repeats for row in rows})
    text = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    if counts[-1] < ENOUGH_REPEATS:
        return f"{text} repeat{'s' if counts[-1] > 1 else ''}: no intervals"
    some = f" where n ≥ {ENOUGH_REPEATS}" if counts[0] < ENOUGH_REPEATS else ""
    return f"{text} repeats, 95 % t intervals{some}"


def with_speedup(sheet: Sheet) -> list[Row]:
    """Select the rows that have a speedup.

    Raises:
        NothingToDraw: there are none.
    """
    rows = [row for row in sheet.from_one_rank() if not math.isnan(row.speedup.mid)]
    if not rows:
        raise NothingToDraw("no 1-rank run to measure speedup from")
    return rows


def baselines(rows: list[Row]) -> str:
    """Name the baselines of the speedup, for a title."""
    by_series = all(row.baseline == row.series for row in rows)
    names = {row.strategy if by_series else row.baseline.split(" ")[0] for row in rows}
    if by_series and len(names) > 1:
        return "each series' own 1-rank run"
    own = {row.strategy for row in rows if row.transform and row.baseline == row.series}
    named = f"{' or '.join(sorted(names - own))} at 1 rank"
    return f"{named} ({', '.join(sorted(own))}: its own)" if own and names - own else named
