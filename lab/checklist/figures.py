"""Readers of figures: each function reads a number from the files of commands."""

from __future__ import annotations

import csv
import inspect
import json
import math
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RUNS = "runs"  # the lab's default
STUDY = "first_hour"  # of all runs that a checklist starts
OPERATIONS = {"/": operator.truediv, "-": operator.sub}


@dataclass(frozen=True)
class Results:
    """Results of commands by name: output, JSON, and records of runs."""

    folder: Path

    def json(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text())

    def output(self, name: str) -> str:
        """Return a command's stdout and stderr."""
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def ended(self, name: str) -> dict[str, Any]:
        """Read a command's end: see lab.checklist.check.run."""
        return self.json(f"{name}.ended")

    def run(self, cell: str) -> Path:
        """Return the directory of a run."""
        return Path(RUNS) / STUDY / cell

    def record(self, cell: str) -> dict[str, Any]:
        return json.loads((self.run(cell) / "record.json").read_text())


Read = Callable[[Results], float]


def reader(text: str) -> Read:
    """Make a reader of `value hardware num_mig`, or of two joined by / or -.

    Args:
        text: the name of a function below and its arguments, as a shell takes words; `key=value`
            is one by name, of YAML's type. Or a number.

    Raises:
        ValueError: there is no such function, or it takes other arguments.
    """
    words = shlex.split(text)
    at = next((place for place, word in enumerate(words) if word in OPERATIONS), None)
    if at is None:
        return _called(words)
    first, second, join = _called(words[:at]), _called(words[at + 1 :]), OPERATIONS[words[at]]
    return lambda results: join(first(results), second(results))


def _called(words: Sequence[str]) -> Read:
    name, *given = words
    if name not in READERS:
        number = float(name)
        return lambda _: number
    named = [re.fullmatch(r"(\w+)=(\S*)", each) for each in given]
    plain = [each for each, pair in zip(given, named, strict=True) if not pair]
    by_name = {pair[1]: yaml.safe_load(pair[2]) for pair in named if pair}
    function = READERS[name]
    try:
        inspect.signature(function).bind(None, *plain, **by_name)
    except TypeError as error:
        raise ValueError(f"{' '.join(words)}: {error}") from None
    return lambda results: float(function(results, *plain, **by_name))


def row(
    results: Results, benchmark: str, key: str, /, *, scale: float = 1.0, **where: Any
) -> float:
    """Read a number from a benchmark's first row that matches `where`; a.b is b in a."""
    rows = results.json(benchmark)["rows"]
    found = [each for each in rows if all(each[k] == v for k, v in where.items())]
    return scale * float(_dig(found[0], key))


def total(results: Results, name: str, key: str) -> float:
    """Sum a number over all rows of a benchmark."""
    return sum(each[key] for each in results.json(name)["rows"])


def value(results: Results, name: str, key: str) -> float:
    """Read a number from a JSON file; NaN for null, which means unknown."""
    found = _dig(results.json(name), key)
    return math.nan if found is None else found


def recorded(results: Results, cell: str, key: str, scale: float = 1.0) -> float:
    """Read a number from a run's record."""
    return scale * float(_dig(results.record(cell), key))


def is_recorded(results: Results, cell: str, /, **values: Any) -> float:
    """Return 1 if the record holds these values, else 0."""
    record = results.record(cell)
    return all(record[key] == value for key, value in values.items())


def num_true(results: Results, cell: str, key: str) -> float:
    """Count what is true in a mapping of a run's record."""
    return sum(_dig(results.record(cell), key).values())


def num_nvlinks(results: Results, name: str) -> float:
    """Count the pairs of GPUs that nvidia-smi calls NVLink (NV18)."""
    links = results.json(name)["environment"]["gpu_links"].splitlines()
    lines = [line.split() for line in links if line.startswith("GPU")]
    return sum(word.startswith("NV") for line in lines for word in line[1:]) / 2


def says(results: Results, name: str, pattern: str) -> float:
    """Return 1 if the output has a match of `pattern`, else 0."""
    return re.search(pattern, results.output(name)) is not None


def printed(results: Results, name: str, pattern: str) -> float:
    """Read the number in the last match of `pattern` in the output; 0 without one."""
    found = re.findall(pattern, results.output(name))
    return float(found[-1]) if found else 0.0


def ended(results: Results, name: str, key: str) -> float:
    """Read a number from the command's end (lab.checklist.check.run)."""
    return results.ended(name)[key]


def seen(results: Results, name: str, key: str) -> float:
    """Read a number of processes that nvidia-smi saw; NaN if none, as in a container."""
    return results.ended(name)[key] or math.nan


def per_step(results: Results, longer: str, shorter: str, pattern: str, steps: int) -> float:
    """Count the matches per step from a run and another with `steps` more steps."""
    counts = [len(re.findall(pattern, results.output(name))) for name in (longer, shorter)]
    return (counts[0] - counts[1]) / steps


def efficiency(results: Results, study: str, strategy: str, world_size: int) -> float:
    """Read a point's efficiency from the summary.csv of lab.plot."""
    with Path(RUNS, study, "figures", "summary.csv").open() as file:
        (found,) = (
            point
            for point in csv.DictReader(file)
            if (point["strategy"], int(point["world_size"])) == (strategy, world_size)
        )
    return float(found["efficiency_mid"])


def share_within(results: Results, cell: str, row_name: str, other: str) -> float:
    """Return the share of one track's time during which another track is busy."""
    from lab.record.trace import TIMELINE, read_trace

    spans = read_trace(results.run(cell) / TIMELINE).spans
    inside = whole = 0.0
    for span in (each for each in spans if each.row == row_name):
        whole += span.end_s - span.start_s
        for cover in (c for c in spans if c.row == other and c.rank == span.rank):
            inside += max(0.0, min(span.end_s, cover.end_s) - max(span.start_s, cover.start_s))
    return inside / whole


def _dig(found: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        found = found[part]
    return found


READERS: dict[str, Callable[..., float]] = {
    each.__name__: each
    for each in (
        *(row, total, value, recorded, is_recorded, num_true, num_nvlinks, says, printed),
        *(ended, seen, per_step, efficiency, share_within),
    )
}
