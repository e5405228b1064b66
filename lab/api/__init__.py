"""The commands as functions, for notebooks and programs: `from lab import api`.

They are not in `lab` itself, whose `sweep`, `predict`, `advise` and `explain` are the modules that
`python -m` runs. Settings are those of the commands. A list is an axis of a grid, and a dotted name
such as `exchange.threshold` goes into a dict before the others.
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
from lab.settings.checks import as_text
from lab.settings.command import Command, read
from lab.settings.errors import ConfigError, as_config_error
from lab.simulate import predict as prediction
from lab.simulate import view as prediction_view
from lab.study.grid import SweepSettings
from lab.study.run import sweep as run_study

Scalar = str | int | float | bool | Path | None
Setting = Scalar | Sequence[Scalar]
Settings = Mapping[str, Setting]


@dataclass(frozen=True, repr=False)
class Answer:
    """The result of a command, as a table and as text. `print` shows the text.

    Attributes:
        frame: the table, with a row for each prediction, option, remedy or point.
        text: the text that the command prints.
    """

    frame: pd.DataFrame
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.frame.to_html(index=False)


@dataclass(frozen=True, repr=False)
class Charted(Answer):
    """The result of a command that also has a chart."""

    draw: Callable[[], Chart]

    def figure(self) -> Any:
        """Return an Altair chart, which notebooks display. The title states the conclusion."""
        return self.draw().with_title()


def sweep(study: str, more: Settings | None = None, /, **settings: Setting) -> Results:
    """Run the missing cells of a study, as lab.sweep does, and load the study.

    The function prints the sweep's progress.

    `api.sweep("mine", {"exchange.threshold": "mean"}, strategy=["onebit", "ddp"], repeats=3)`

    Args:
        study: the study's name. Its runs are saved in the folder `runs/NAME`, or in the folder that
            `runs_dir=` names.
        more: settings whose names contain dots.
        settings: all other settings of lab.sweep and its runs. A list runs each of its values.

    Returns:
        The study, as `lab.load` returns it. `.frame` has a row for each run, including failed runs,
            and `.summary()` has a row for each point. Times are in seconds and sizes in bytes.

    Raises:
        ConfigError: a setting is wrong, or no cell of the study has finished.
        KeyboardInterrupt: you interrupted the sweep. Call the function again to continue.
    """
    given = {"study": study, **(more or {}), **settings}
    line = read(Command("lab.sweep", "", (), SweepSettings, runs=True), _words(given))

    from lab.web.live import served

    code = run_study(line, served)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise ConfigError(f"study={study}: no cell is done; the lines above give the reasons")
    return load(Path(str(given.get("runs_dir", "runs"))) / study)


def predict(more: Settings | None = None, /, **settings: Setting) -> Charted:
    """Predict step times on other hardware, as lab.predict does. Nothing is trained.

    `api.predict(profile="resnet50_p100", hardware="dgx1_p100", world_size=[1, 8], strategy="ring")`

    Args:
        more: settings whose names contain dots.
        settings: all other settings: `hardware`, `profile` or `model`, and settings of a run. For
            a list, each value is predicted.

    Returns:
        A table with a row for each combination of settings: `series`, `world_size`, `batch_size`
            (global), `step_s` and `exposed_s` (seconds), `payload_bytes` (sent by the busiest rank
            per step), `speedup` and `speedup_interval` (a pair; 95 %). The figure shows the speedup
            by number of ranks.

    Raises:
        ConfigError: a setting is wrong, or the hardware has too few devices.
    """
    found, _ = prediction.predicted(prediction.read(_words({**(more or {}), **settings})))
    text = prediction_view.table(found)
    return Charted(pd.DataFrame(found["rows"]), text, lambda: prediction_view.chart(found))


def advise(more: Settings | None = None, /, **settings: Setting) -> Charted:
    """Rank options for training by their predicted performance, as lab.advise does.

    Nothing is trained.

    `api.advise(profile="resnet50_p100", hardware="eth25g", target="efficiency>=0.8")`

    Args:
        more: settings whose names contain dots.
        settings: all other settings: `target`, and the settings of `predict`. If you do not set
            strategies, numbers of ranks or batch sizes, a grid of them is tried.

    Returns:
        A table with a row for each option, best first: `series`, `lossy`, `world_size`,
            `batch_size` (global), `samples_per_s`, `step_s` (seconds), `memory_bytes` (without
            activations), `efficiency` (speedup / ranks), `limit` and `command`. The figure shows
            the best options.

    Raises:
        ConfigError: a setting is wrong, or no option fits.
    """
    found = advised(advice_request.read(_words({**(more or {}), **settings})))
    text = advice_view.text(found)
    return Charted(pd.DataFrame(found["rows"]), text, lambda: advice_view.chart(found))


def explain(path: str | Path) -> Answer:
    """Explain what limits the speed of a run, or of each point of a study, as lab.explain does.

    `api.explain("runs/mine")`

    Args:
        path: the folder of a study, or of one run (STUDY/CELL).

    Returns:
        For a run, a table with a row for each remedy, best first: `change`, `why`, and `saves_s`
            (seconds per step; NaN: unknown). For a study, a table with a row for each point on
            several ranks: `verdict` and `reason`.

    Raises:
        ConfigError: the folder cannot be read, or the run used only one rank.
    """
    with as_config_error("", OSError):
        return Answer(*diagnosis_view.explained(Path(path)))


def _words(settings: Settings) -> list[str]:
    """Write settings as a command line has them."""
    return [
        f"{key}={as_text(value if isinstance(value, Scalar) else tuple(value))}"
        for key, value in settings.items()
    ]
