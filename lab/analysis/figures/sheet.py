"""The data of a study's figures, and what the figures share: legend entries, title and footer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.analysis.records import Study
from lab.analysis.speedup import CEILING, Row
from lab.draw.looks import Look, order
from lab.draw.style import GREY, HATCH, frame, unique
from lab.measure.intervals import ENOUGH_REPEATS


class NothingToDraw(Exception):
    """A figure's data are absent; the text says which."""


@dataclass(frozen=True)
class Sheet:
    """Data of one set of figures: the rows of one scaling of a study."""

    study: Study
    scaling: str
    rows: tuple[Row, ...]
    looks: dict[str, Look]

    def measured(self) -> list[Row]:
        """Rows with throughput runs.

        Raises:
            NothingToDraw: there are none.
        """
        rows = [row for row in self.rows if row.num_repeats]
        if not rows:
            raise NothingToDraw("no finished throughput run")
        return rows

    def batch_name(self) -> str:
        """Name the batch size that this scaling keeps."""
        return "global batch" if self.scaling == "strong" else "per-rank batch"

    def label(self, series: str) -> str:
        """The series as a legend names it, with what sets it apart from the others."""
        row = next(row for row in self.rows if row.series == series)
        if row.strategy == CEILING:
            return f"{series} (ceiling)"
        return f"{series} (another model)" if row.transform else series

    def emulated(self) -> list[str]:
        """How the emulated ones among the rows are emulated."""
        return sorted({row.emulation for row in self.rows} - {""})


def series_of(rows: Iterable[Row]) -> list[str]:
    """Distinct series in reading order."""
    return sorted({row.series for row in rows}, key=order)


def line_handle(sheet: Sheet, series: str) -> Line2D:
    """The legend entry of a series drawn as a line."""
    look, text = sheet.looks[series], sheet.label(series)
    return Line2D([], [], color=look.colour, ls=look.line, marker=look.marker, label=text)


def emulated_handle(sheet: Sheet, bars: bool) -> list[Artist]:
    """The legend entry of emulated points: hatched bars, hollow markers; nothing without any."""
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
        sheet: what it was drawn from.
        title: wrapped so that it ends before the legend.
        handles: the legend's entries.
        sample: how many runs stand behind a point, and what the error bars are.
        notes: what else a reader must know.
    """
    how = "; ".join(sheet.emulated())
    footer = [f"{_context(sheet)} · {sample}", notes, f"emulated: {how}" if how else ""]
    return frame(figure, title, handles, footer)


def repeats(rows: Iterable[Row]) -> str:
    """How many repeats stand behind the throughput of `rows`, and what their intervals are."""
    counts = unique(row.num_repeats for row in rows)
    text = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    if counts[-1] == 1:
        return f"{text} repeat: no intervals"
    small = f" (nominal: n<{ENOUGH_REPEATS})" if counts[0] < ENOUGH_REPEATS else ""
    return f"{text} repeats, 95 % bootstrap intervals{small}"


def _context(sheet: Sheet) -> str:
    cells = sheet.study.cells
    shared = [
        f"{key} {', '.join(unique(c.settings[key] for c in cells if key in c.settings))}"
        for key in ("model", "data", "device", "machine")
        if any(key in cell.settings for cell in cells)
    ]
    return " · ".join([f"study {sheet.study.name}", *shared])
