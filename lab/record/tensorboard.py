"""TensorBoard's event files in the run directory: `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.record.recorder import require_package
from lab.record.schema import Record


class TensorBoardRecorder:
    """A scalar per curve, in `tensorboard/` of the run directory.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self) -> None:
        require_package("tensorboard", "tensorboard")
        self._writer: Any = None

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        """Open a new event file; TensorBoard hides what an earlier one has of later steps."""
        from torch.utils.tensorboard import SummaryWriter  # only here: it loads TensorBoard

        purge = first_step + 1 if first_step else None
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, record: Record) -> None:
        self._writer.close()
