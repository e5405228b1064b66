"""Results of studies as tables and charts, for notebooks and programs: `lab.load("runs/demo")`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.charts import CHARTS, NothingToDraw, convergence
from lab.analysis.differences import Place, place_of
from lab.analysis.export import records_table
from lab.analysis.leaders import leaders
from lab.analysis.map import map_of_strategies
from lab.analysis.noise import floor_text, noise_floor
from lab.analysis.points import Point, points_of
from lab.analysis.records import Study, load_study
from lab.analysis.speedup import Row, shared_runs, table
from lab.analysis.summary import frame_of
from lab.draw.chart import WIDTH, Chart
from lab.draw.looks import Look, looks_of
from lab.record.schema import SCALINGS
from lab.task.metrics import main_metric

NAMES = (*CHARTS, convergence.__name__, map_of_strategies.__name__)
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

    @cached_property
    def points(self) -> list[Point]:
        """The runs of each point."""
        return points_of(self.study.cells)

    @cached_property
    def floor(self) -> float:
        """The noise floor (lab.analysis.noise); NaN if unknown."""
        return noise_floor(self.points)

    @cached_property
    def looks(self) -> dict[str, Look]:
        """The look of each series, in reading order: the same in all charts."""
        return looks_of(row.series for row in self.rows)

    @property
    def has_map(self) -> bool:
        """Whether strategies were measured over several links, or machines."""
        return len({cell.circumstances for cell in self.study.cells}) > 1

    @property
    def scalings(self) -> list[str]:
        """The scalings that were measured."""
        return [each for each in SCALINGS if any(row.scaling == each for row in self.rows)]

    def summary(self) -> pd.DataFrame:
        """Return a row for each series, number of ranks and batch.

        Times are in seconds and sizes in bytes. `speedup_lo`, `_mid` and `_hi` are an interval of
        95 % over repeats; NaN: not measured. `leads`: no other series was shown to be faster there.
        `metric`: the name of the column with the task's own one.
        """
        return self._summary.copy()

    @cached_property
    def _summary(self) -> Any:
        summary = frame_of(self.rows)
        summary["fixed_batch_size"] = [row.fixed_batch_size for row in self.rows]
        groups: dict[tuple[object, ...], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.world_size, *row.context), []).append(row)
        first = {place: set(leaders(group)) for place, group in groups.items()}
        summary["leads"] = [
            row.series in first[(row.world_size, *row.context)] for row in self.rows
        ]
        summary["metric"] = main_metric(name for row in self.rows for name in row.final)
        return summary

    def chart(
        self,
        name: str = "speedup",
        scaling: str | None = None,
        width: int = WIDTH,
        commands: Mapping[Place, str] | None = None,
    ) -> Chart:
        """Return a chart, with its message and its notes.

        Args:
            name: of NAMES.
            scaling: "strong" or "weak"; None: the one that was measured, strong of both.
            width: pixels.
            commands: how to measure a point again, told where the pointer rests.

        Raises:
            ValueError: there is no such chart, or nothing was measured that it shows.
        """
        if name not in NAMES:
            raise ValueError(f"figure={name}: allowed are {', '.join(NAMES)}")
        summary = self._summary
        found = self.scalings
        wanted = scaling or next(iter(found), "strong")
        if wanted not in found:
            raise NothingToDraw(f"scaling={wanted}: measured are {', '.join(found) or 'none'}")
        if name == convergence.__name__:
            return convergence(self.study.cells, wanted, self.looks, width)
        if name == map_of_strategies.__name__:
            return map_of_strategies(self.study.cells, self.floor, width)
        if commands:
            summary = summary.assign(command=[commands.get(place_of(r), "") for r in self.rows])
        return CHARTS[name](summary[summary["scaling"] == wanted], self.looks, width)

    def notes(self, scaling: str) -> list[str]:
        """Say what was run on which machines, what differences count, and whose runs are shared."""
        machines = self.study.machines
        keys = ("model", "data", *(() if machines else ("device", "machine")))
        values = {
            key: sorted({c.settings[key] for c in self.study.cells if key in c.settings})
            for key in keys
        }
        about = [f"{key} {', '.join(each)}" for key, each in values.items() if each]
        lines = [
            " · ".join([f"study {self.study.name}", *about]),
            "; ".join(f"on={label}: {text}" for label, text in machines.items()),
            floor_text(self.floor),
            shared_runs(row for row in self.rows if row.scaling == scaling),
        ]
        return [f"{line}." for line in lines if line]

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
