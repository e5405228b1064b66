"""The data of a study's figures, and their common parts: legend entries, title and footer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.analysis.noise import floor_text
from lab.analysis.records import Study
from lab.analysis.speedup import CEILING, Row, shared_runs
from lab.draw.looks import Look, order
from lab.draw.page import SCREEN, Page
from lab.draw.style import GREY, HATCH, canvas, frame, unique
from lab.measure.intervals import ENOUGH_REPEATS


class NothingToDraw(Exception):
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

    def canvas(
        self, num_rows: int, num_columns: int, width: float, height: float, **share: Any
    ) -> tuple[Figure, list[list[Axes]]]:
        """Make a figure for this page; see lab.draw.style."""
        return canvas(num_rows, num_columns, width, height, self.page, **share)

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


def line_handle(sheet: Sheet, series: str) -> Line2D:
    """Make the legend entry of a series drawn as a line."""
    look, text = sheet.looks[series], sheet.label(series)
    return Line2D([], [], color=look.colour, ls=look.line, marker=look.marker, label=text)


def emulated_handle(sheet: Sheet, bars: bool) -> list[Artist]:
    """Make the legend entry of emulated points, hatched or hollow; empty without any."""
    if not sheet.emulated():
        return []
    if bars:
        return [Patch(facecolor="white", edgecolor=GREY, hatch=HATCH, label="emulated")]
    hollow = Line2D([], [], color=GREY, marker="o", linestyle="", label="emulated")
    hollow.set_markerfacecolor("white")
    return [hollow]


def finish(
    figure: Figure, sheet: Sheet, title: str, handles: list[Artist], sample: str, notes: str = ""
) -> Figure:
    """Give a study's figure its title, its legend outside the axes and its footer.

    Args:
        figure: with everything drawn; made wider for a legend of long names.
        sheet: the data it was drawn from.
        title: wrapped so that it ends before the legend.
        handles: the legend's entries.
        sample: number of runs behind a point, and the kind of error bars.
        notes: further remarks for the reader.
    """
    how = "; ".join(sheet.emulated())
    floor = floor_text(sheet.floor)
    where = "; ".join(f"on={label}: {text}" for label, text in sheet.study.machines.items())
    emulated = f"emulated: {how}" if how else ""
    context = f"{_context(sheet)} · {sample}"
    footer = [context, where, floor, notes, shared_runs(sheet.rows), emulated]
    return frame(figure, title, handles, footer, sheet.page)


def repeats(rows: Iterable[Row]) -> str:
    """Describe the number of repeats behind the throughput of `rows`, and their intervals."""
    counts = unique(row.num_repeats for row in rows)
    text = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    if counts[-1] < ENOUGH_REPEATS:
        return f"{text} repeat{'s' if counts[-1] > 1 else ''}: no intervals"
    some = f" where n ≥ {ENOUGH_REPEATS}" if counts[0] < ENOUGH_REPEATS else ""
    return f"{text} repeats, 95 % t intervals{some}"


def _context(sheet: Sheet) -> str:
    cells = sheet.study.cells
    shared = [
        f"{key} {', '.join(unique(c.settings[key] for c in cells if key in c.settings))}"
        for key in ("model", "data", *(() if sheet.study.machines else ("device", "machine")))
        if any(key in cell.settings for cell in cells)
    ]
    return " · ".join([f"study {sheet.study.name}", *shared])
