"""Weights & Biases in addition to the run directory, never instead of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.record.schema import Record

MODES = ("offline", "online")


class WandbRecorder:
    """A wandb run per cell, grouped by study, from rank 0. No failure of wandb ends a run.

    Args:
        project: name of the wandb project.
        mode: "offline" keeps everything next to the run directory, "online" sends it.

    Raises:
        ValueError: `mode` is neither.
    """

    def __init__(self, project: str, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"recorder.mode={mode}: allowed are {', '.join(MODES)}")
        self._project = project
        self._mode = mode
        self._run: Any = None

    def start(self, directory: Path, study: str, config: dict[str, Any]) -> None:
        """Open the run of the cell in `directory`."""
        try:
            import wandb

            self._run = wandb.init(
                project=self._project,
                mode=self._mode,  # type: ignore[arg-type]
                dir=str(directory),
                name=directory.name,
                group=study,
                config=config,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except Exception as error:
            self._give_up(error)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log numbers of one step."""

        def log(run: Any) -> None:
            run.log(values, step=step)

        self._try(log)

    def finish(self, record: Record) -> None:
        """Close the run with the record as its summary."""

        def finish(run: Any) -> None:
            run.summary.update(record.to_json())
            run.finish()

        self._try(finish)

    def _try(self, action: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"lab.train: recorder=wandb is off: {line}", file=sys.stderr)
