"""Results of studies as tables and charts, for notebooks and programs: `lab.load("runs/demo")`."""

from __future__ import annotations

from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.charts import CHARTS
from lab.analysis.export import records_table
from lab.analysis.leaders import leaders
from lab.analysis.records import Study, load_study
from lab.analysis.sheet import NothingToDraw
from lab.analysis.speedup import Row, table
from lab.analysis.summary import frame_of
from lab.draw.chart import Chart
from lab.record.schema import SCALINGS

SHOWN = {  # columns of a notebook's table, and their titles
    **{"series": "series", "world_size": "ranks", "fixed_batch_size": "batch"},
    **{"num_repeats": "repeats", "step_s": "step (ms)", "speedup_mid": "speedup"},
    **{"speedup_lo": "from", "speedup_hi": "to", "payload_max_bytes": "MB sent"},
}
SCALES = {"step_s": 1e3, "payload_max_bytes": 1e-6}


class Results:
    """The runs of one study, or of several.

    Attributes:
        study: its runs, and why others cannot be read.
    """

    def __init__(self, study: Study, baseline: str | None = None) -> None:
        self.study, self._baseline = study, baseline

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row for each run, failed ones too, with every value of its record.

        Columns have the record's dotted keys, such as `step_s.median` (seconds) and
        `settings.optim.lr`; lists are JSON text.
        """
        return records_table(self.study)

    @cached_property
    def rows(self) -> list[Row]:
        """The statistics of each point, as lab.analysis.speedup computes them."""
        return table(self.study, self._baseline)

    def summary(self) -> pd.DataFrame:
        """Return a row for each series, number of ranks and batch.

        Times are in seconds and sizes in bytes. `speedup_lo`, `_mid` and `_hi` are an interval of
        95 % over repeats; NaN: not measured. `leads`: no other series was shown to be faster there.
        """
        summary = frame_of(self.rows)
        summary["fixed_batch_size"] = [row.fixed_batch_size for row in self.rows]
        groups: dict[tuple[object, ...], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.world_size, *row.context), []).append(row)
        first = {place: set(leaders(group)) for place, group in groups.items()}
        summary["leads"] = [
            row.series in first[(row.world_size, *row.context)] for row in self.rows
        ]
        return summary

    def chart(self, name: str = "speedup", scaling: str | None = None) -> Chart:
        """Return a chart, with its message and its notes.

        Args:
            name: speedup, efficiency, throughput or payload.
            scaling: "strong" or "weak"; None: the one that was measured, strong of both.

        Raises:
            ValueError: there is no such chart, or nothing was measured that it shows.
        """
        if name not in CHARTS:
            raise ValueError(f"figure={name}: allowed are {', '.join(CHARTS)}")
        summary: Any = self.summary()
        found = [each for each in SCALINGS if (summary["scaling"] == each).any()]
        wanted = scaling or next(iter(found), "strong")
        if wanted not in found:
            raise NothingToDraw(f"scaling={wanted}: measured are {', '.join(found) or 'none'}")
        return CHARTS[name](summary[summary["scaling"] == wanted])

    def figure(self, name: str = "speedup", scaling: str | None = None) -> Any:
        """Return the same as a chart of Altair, which a notebook shows. Arguments: see `chart`."""
        return self.chart(name, scaling).with_title()

    def _repr_html_(self) -> str:
        """Show the points as a table, as notebooks do."""
        shown: Any = self.summary()[list(SHOWN)]
        scaled = shown.assign(**{key: shown[key] * by for key, by in SCALES.items()})
        html = scaled.rename(columns=SHOWN).to_html(index=False, na_rep="", float_format="%.3g")
        return f"<h4>{escape(self.study.name)}: {len(self.study.cells)} runs</h4>{html}"

    def __repr__(self) -> str:
        return f"Results({self.study.name}: {len(self.study.cells)} runs, {len(self.rows)} points)"


def load(folder: str | Path, *more: str | Path, baseline: str | None = None) -> Results:
    """Read the runs of one study, or of several as one.

    Args:
        folder: such as runs/demo.
        baseline: the strategy whose 1-rank runs speedup is measured from; None: `none` or, without
            it, each series' own.

    Raises:
        ValueError: no such folder, or no record in it that can be read.
    """
    return Results(load_study(Path(folder), *map(Path, more)), baseline)
