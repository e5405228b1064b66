"""Recorder: where a run's numbers go while it runs, besides its own directory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from lab.record.schema import Record


class Recorder(Protocol):
    """A place for curves: numbers over steps, by name. Only rank 0 calls it.

    The name of a curve begins with `train/` or `test/` and ends in its unit (`train/step_s`).
    Methods may raise any exception: `Guarded` turns it into a warning.
    """

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        """Begin to record.

        Args:
            directory: the run directory; its name is that of the cell.
            config: all settings of the run.
            first_step: optimizer steps done already. If it is not 0 the run continues, and what an
                earlier start recorded of later steps no longer holds.
        """
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers after `step` optimizer steps. Steps never go back, but may repeat."""
        ...

    def finish(self, record: Record) -> None:
        """Record how the run ended, and close all files."""
        ...


class Guarded:
    """A recorder whose first failure turns it off, with a warning: it never ends a run.

    Args:
        recorder: None: all calls do nothing.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    @property
    def works(self) -> bool:
        """True if what is logged is recorded."""
        return self._recorder is not None

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        self._try(lambda recorder: recorder.start(directory, study, config, first_step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda recorder: recorder.log(step, values))

    def finish(self, record: Record) -> None:
        self._try(lambda recorder: recorder.finish(record))

    def _try(self, action: Callable[[Recorder], None]) -> None:
        if self._recorder is None:
            return
        try:
            action(self._recorder)
        except (Exception, SystemExit) as error:
            name = type(self._recorder).__name__
            self._recorder = None
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"lab.train: {name} is off: {line}", file=sys.stderr)


def require_package(recorder: str, package: str) -> None:
    """Check that a recorder's library is installed, before anything is trained.

    Raises:
        ValueError: it is not.
    """
    if find_spec(package) is None:
        raise ValueError(f"recorder={recorder}: needs the package {package}: pip install {package}")
