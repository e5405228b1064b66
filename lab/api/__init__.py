"""The commands as functions, for notebooks and programs: `from lab import api`.

They are not in `lab` itself, whose `sweep`, `predict`, `advise` and `explain` are the modules that
`python -m` runs. Settings are those of the commands: `exchange.threshold` is written
`{"exchange.threshold": "mean"}`, before the others, and a list is an axis of a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab.advice import request as advice_request
from lab.advice import view as advice_view
from lab.advice.advise import advised
from lab.analysis.results import Results, load
from lab.diagnosis import view as diagnosis_view
from lab.draw.chart import Chart
from lab.settings.command import Command, read
from lab.settings.errors import ConfigError
from lab.simulate import predict as prediction
from lab.simulate import view as prediction_view
from lab.study.grid import SweepSettings
from lab.study.run import sweep as run_study

Setting = str | int | float | bool | None | Sequence["str | int | float | bool | None"]
Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Answer:
    """A table with its explanation.

    Attributes:
        frame: a row for each prediction, way to train, remedy or run.
        text: what the command prints.
    """

    frame: pd.DataFrame
    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.frame.to_html(index=False)


@dataclass(frozen=True)
class Charted(Answer):
    """A table with its explanation and its chart."""

    draw: Callable[[], Chart]

    def figure(self) -> Any:
        """Return the chart of Altair, which notebooks show; its title is its message."""
        return self.draw().with_title()


def sweep(study: str, more: Settings | None = None, /, **settings: Setting) -> Results:
    """Run the missing cells of a study, as lab.sweep does, and load it.

    Args:
        study: its name: a folder of `runs`, or of `runs_dir=`.
        more: settings whose names are no identifiers. settings: of the grid and its cells.

    Returns:
        The study, with its cells that failed (`lab.load`): `.frame` has a row for each run, with
        seconds and bytes, `.summary()` one for each point.

    Raises:
        ConfigError: a setting is wrong, or no cell of the study is done.
        KeyboardInterrupt: it was interrupted; the same call continues.
    """
    given = {"study": study, **(more or {}), **settings}
    line = read(Command("lab.sweep", "", (), SweepSettings, runs=True), _words(given))

    from lab.web.live import served

    code = run_study(line, served)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise ConfigError(f"study={study}: no cell is done; its lines above say why")
    return load(Path(str(given.get("runs_dir", "runs"))) / study)


def predict(more: Settings | None = None, /, **settings: Setting) -> Charted:
    """Predict step times on other hardware, as lab.predict does.

    Returns:
        A row for each cell: `step_s`, `exposed_s` (seconds), `speedup` and `speedup_interval`
        (95 %), `world_size`, `batch_size` (global) and others. The figure is speedup over ranks.

    Raises:
        ConfigError: a setting is wrong, or the hardware cannot hold the ranks.
    """
    found, _ = prediction.predicted(prediction.read(_words({**(more or {}), **settings})))
    text = prediction_view.table(found)
    return Charted(pd.DataFrame(found["rows"]), text, lambda: prediction_view.chart(found))


def advise(more: Settings | None = None, /, **settings: Setting) -> Charted:
    """Rank ways to train, as lab.advise does.

    Returns:
        A row for each way, best first: `series`, `lossy`, `world_size`, `batch_size` (global),
        `samples_per_s`, `step_s` (seconds), `efficiency` and others. The figure has the best ones.

    Raises:
        ConfigError: a setting is wrong, or no way fits.
    """
    found = advised(advice_request.read(_words({**(more or {}), **settings})))
    text = advice_view.text(found)
    return Charted(pd.DataFrame(found["rows"]), text, lambda: advice_view.chart(found))


def explain(path: str | Path) -> Answer:
    """Explain why a run, or each multi-rank point of a study, is not faster, as lab.explain does.

    Args:
        path: folder of a run (STUDY/CELL), or of a study.

    Returns:
        Of a run: a row for each remedy, best first, with `change`, `why` and `saves_s` (seconds of
        a step; NaN: unknown). Of a study: a row for each point, with its `verdict` and `reason`.

    Raises:
        ConfigError: it cannot be read, or the run has one rank.
    """
    try:
        return Answer(*diagnosis_view.explained(Path(path)))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None


def _words(settings: Settings) -> list[str]:
    """Write settings as a command line has them."""
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: Setting) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    return ",".join(map(_text, value))
