"""Weights & Biases in addition to the run directory, never instead of it."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.record.recorder import require_package
from lab.record.schema import Record
from lab.settings import checks
from lab.settings.secrets import is_secret

MODES = ("offline", "online")


class WandbRecorder:
    """A wandb run per cell, grouped by study.

    Args:
        project: name of the wandb project.
        mode: "offline" keeps everything in the run directory, "online" sends it.

    Raises:
        ValueError: `mode` is neither, or wandb is not installed.
    """

    def __init__(self, project: str, mode: str) -> None:
        checks.one_of("recorder.mode", mode, MODES)
        require_package("wandb", "wandb")
        self._project = project
        self._mode = mode
        self._run: Any = None

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        """Open the run of the cell in `directory`."""
        import wandb

        with _hidden():
            self._run = wandb.init(
                project=self._project,
                mode=self._mode,  # type: ignore[arg-type]
                dir=str(directory),
                name=directory.name,
                group=study,
                config=config,
                settings=wandb.Settings(silent=True, console="off"),
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, record: Record) -> None:
        """Close the run with the record as its summary."""
        self._run.summary.update(record.to_json())
        self._run.finish()


@contextmanager
def _hidden() -> Generator[None]:
    """Hide SLURM's secrets: wandb records all variables of SLURM."""
    found = [name for name in os.environ if name.startswith("SLURM") and is_secret(name)]
    values = {name: os.environ.pop(name) for name in found}
    try:
        yield
    finally:
        os.environ.update(values)
