"""Two studies beside each other: what differs, and what cannot be told apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lab.analysis.differences import Difference, differences
from lab.web.contents import Contents
from lab.web.tables import Table, TableCell
from lab.web.texts import percent_text


@dataclass(frozen=True)
class Compared:
    """The second study beside the first.

    Attributes:
        verdict: a sentence with counts.
        floors: the noise floor of each study's machine, a line each.
    """

    verdict: str
    floors: Sequence[str]
    table: Table


def compare(first: Contents, second: Contents) -> Compared:
    """Compare the points that two studies share."""
    known = [floor for floor in (first.floor, second.floor) if not math.isnan(floor)]
    found = differences(first.rows, second.rows, max(known, default=math.nan))
    names = [contents.study.folder.name for contents in (first, second)]
    floors = [
        f"{name}: noise floor " + ("unknown" if math.isnan(floor) else f"{100 * floor:.1f} %")
        for name, floor in zip(names, (first.floor, second.floor), strict=True)
    ]
    return Compared(_verdict(found, *names), floors, _table(found, *names))


def _verdict(found: Sequence[Difference], first: str, second: str) -> str:
    if not found:
        return f"{first} and {second} share no measured point."
    counts = Counter(each.finding for each in found)
    parts = [f"{count} {finding}" for finding, count in sorted(counts.items())]
    return f"Of {len(found)} points that both measured, {second} is at {', '.join(parts)}."


def _table(found: Sequence[Difference], first: str, second: str) -> Table:
    rows = [
        [
            TableCell(each.row.series),
            TableCell(str(each.row.world_size), each.row.world_size),
            TableCell(str(each.row.fixed_batch_size), each.row.fixed_batch_size),
            TableCell(percent_text(each.ratio), each.ratio.mid),
            TableCell(str(each.row.num_repeats), each.row.num_repeats),
            TableCell(each.finding),
        ]
        for each in found
    ]
    title = f"Steps of {second}, compared with {first}; intervals hold for all lines together"
    header = ["series", "ranks", "batch", "step", "n", f"{second} is"]
    return Table("differences", title, header, rows)
