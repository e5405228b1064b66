"""Readers of figures from the files of commands. Each function returns a reader of Results."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lab.checklist.item import RUNS, Results

Read = Callable[[Results], float]


def row(name: str, key: str, scale: float = 1.0, /, **where: Any) -> Read:
    """Read a number from a benchmark's first row that matches `where`; a.b is b in a."""

    def read(results: Results) -> float:
        rows = results.json(name)["rows"]
        found = [each for each in rows if all(each[k] == v for k, v in where.items())]
        return scale * float(_dig(found[0], key))

    return read


def total(name: str, key: str) -> Read:
    """Sum a number over all rows of a benchmark."""
    return lambda results: float(sum(each[key] for each in results.json(name)["rows"]))


def less(name: str, key: str, scale: float, this: str, other: str) -> Read:
    """Read the difference between two rows of a benchmark, given by their `name`."""
    first, second = row(name, key, scale, name=this), row(name, key, scale, name=other)
    return lambda results: first(results) - second(results)


def value(name: str, key: str, scale: float = 1.0) -> Read:
    """Read a number from a JSON file; NaN for null, which means unknown."""

    def read(results: Results) -> float:
        found = _dig(results.json(name), key)
        return math.nan if found is None else scale * float(found)

    return read


def recorded(cell: str, key: str, scale: float = 1.0) -> Read:
    """Read a number from a run's record."""
    return lambda results: scale * float(_dig(results.record(cell), key))


def is_recorded(cell: str, /, **values: Any) -> Read:
    """Return 1 if the record holds these values, else 0."""

    def read(results: Results) -> float:
        record = results.record(cell)
        return float(all(record[key] == value for key, value in values.items()))

    return read


def says(name: str, pattern: str) -> Read:
    """Return 1 if the output has a match of `pattern`, else 0."""
    return lambda results: float(re.search(pattern, results.output(name)) is not None)


def printed(name: str, pattern: str) -> Read:
    """Read the number in the last match of `pattern` in the output; 0 without one."""

    def read(results: Results) -> float:
        found = re.findall(pattern, results.output(name))
        return float(found[-1]) if found else 0.0

    return read


def ended(name: str, key: str) -> Read:
    """Read a number from the command's end (lab.checklist.process.run)."""
    return lambda results: float(results.ended(name)[key])


def seen(name: str, key: str) -> Read:
    """Read a number of processes that nvidia-smi saw; NaN if none, as in a container."""
    return lambda results: float(results.ended(name)[key] or math.nan)


def per_step(longer: str, shorter: str, pattern: str, steps: int) -> Read:
    """Count the matches per step from a run and another with `steps` more steps."""

    def read(results: Results) -> float:
        counts = [len(re.findall(pattern, results.output(name))) for name in (longer, shorter)]
        return (counts[0] - counts[1]) / steps

    return read


def layers_ms(name: str) -> Read:
    """Read the time of all layers, forward and backward, from lab.profile_layers' output."""
    return printed(name, r"layers ([\d.]+) ms;")


def ratio(read: Read, to: Read) -> Read:
    return lambda results: read(results) / to(results)


def efficiency(study: str, strategy: str, world_size: int) -> Read:
    """Read a point's efficiency from the summary.csv of lab.plot."""

    def read(results: Results) -> float:
        path = Path(RUNS, study, "figures", "summary.csv")
        with path.open() as file:
            (found,) = (
                point
                for point in csv.DictReader(file)
                if (point["strategy"], int(point["world_size"])) == (strategy, world_size)
            )
        return float(found["efficiency_mid"])

    return read


def share_within(cell: str, row_name: str, other: str) -> Read:
    """Return the share of one track's time during which another track is busy."""

    def read(results: Results) -> float:
        from lab.record.trace import TIMELINE, read_trace

        spans = read_trace(results.run(cell) / TIMELINE).spans
        inside = whole = 0.0
        for span in (each for each in spans if each.row == row_name):
            whole += span.end_s - span.start_s
            for cover in (c for c in spans if c.row == other and c.rank == span.rank):
                inside += max(0.0, min(span.end_s, cover.end_s) - max(span.start_s, cover.start_s))
        return inside / whole

    return read


def _dig(found: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        found = found[part]
    return found
