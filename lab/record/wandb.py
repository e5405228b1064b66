"""Weights & Biases beside the run directory, never instead of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

MODES = ("offline", "online")


class WandbRecorder:
    """One run per cell, grouped by study, from rank 0. Nothing that wandb does ends a run.

    Args:
        project: its name there.
        mode: "offline" keeps everything beside the run directory, "online" sends it.

    Raises:
        ValueError: another mode.
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
        """Numbers of one step."""
        self._try(lambda run: run.log(values, step=step))

    def finish(self, record: dict[str, Any]) -> None:
        """The record as the run's summary."""
        self._try(lambda run: (run.summary.update(record), run.finish()))

    def _try(self, action: Any) -> None:
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
