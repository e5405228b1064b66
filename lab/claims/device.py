"""Networks, benchmarks and runs, against which claims about a single device are checked.

A claim's `at:` holds the arguments of its quantity, a function here or in lab/claims/counted.py and
lab/claims/benched.py. A quantity counts (no clock: it holds on any machine) or measures.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.claims.metrics import Missing
from lab.measure.intervals import Interval
from lab.settings.config import load
from lab.settings.overrides import own_choices
from lab.settings.reading import read_json

if TYPE_CHECKING:  # pandas and torch take seconds, and not every paper needs them
    from lab.analysis.records import Cell
    from lab.problem.build import Blueprint


@dataclass(frozen=True)
class Device:
    """Networks to count, and what was measured.

    Attributes:
        networks: settings of a run by the name that claims use.
        benches: words after lab.bench by the name of their result.
        folder: holds NAME.json for the results that there are; None: there are none.
        cells: runs of the paper's study.
    """

    networks: Mapping[str, str] = field(default_factory=dict[str, str])
    benches: Mapping[str, str] = field(default_factory=dict[str, str])
    folder: Path | None = None
    cells: Sequence[Cell] = ()

    def blueprint(self, network: str) -> Blueprint:
        """Build a network for its shapes. ValueError: the paper names no such network."""
        from lab.problem.build import blueprint

        return blueprint(load(self._settings(network)))

    def batch(self, network: str) -> int:
        """Return the batch that a network's settings give it."""
        return load(self._settings(network)).batch_size

    def result(self, name: str) -> dict[str, Any]:
        """Return a result of lab.bench.

        Raises:
            Missing: there is none.
            ValueError: the paper has no such benchmark, or the file is none of its results.
        """
        if name not in self.benches:
            raise ValueError(f"result={name}: allowed are {', '.join(self.benches)}")
        path = self.folder / f"{name}.json" if self.folder else None
        if path is None or not path.is_file():
            raise Missing
        return _read(path, self.benches[name].split()[0])

    def results(self) -> dict[str, dict[str, Any]]:
        """Return all results that there are, by name."""
        found: dict[str, dict[str, Any]] = {}
        for name in self.benches:
            try:
                found[name] = self.result(name)
            except Missing:
                continue
        return found

    def _settings(self, network: str) -> Sequence[str]:
        if network not in self.networks:
            raise ValueError(f"network={network}: allowed are {', '.join(self.networks)}")
        return own_choices(shlex.split(self.networks[network]))


@functools.cache
def _read(path: Path, bench: str) -> dict[str, Any]:
    try:
        result = read_json(path)
    except OSError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(result, dict) or result.get("bench") != bench:
        raise ValueError(f"{path}: must be a result of lab.bench {bench}")
    return result


Quantity = Callable[..., Interval]


def matches(pattern: str, *names: str) -> bool:
    """Tell whether a regular expression matches one of the names entirely."""
    return any(re.fullmatch(pattern, name) for name in names)
