"""How figures are read off what commands leave. Each maker's result takes Results."""

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
    """A number of the first row of a benchmark in which all of `where` holds; a.b is b in a."""

    def read(results: Results) -> float:
        rows = results.json(name)["rows"]
        found = [each for each in rows if all(each[k] == v for k, v in where.items())]
        return scale * float(_dig(found[0], key))

    return read


def total(name: str, key: str) -> Read:
    """The sum over all rows of a benchmark."""
    return lambda results: float(sum(each[key] for each in results.json(name)["rows"]))


def less(name: str, key: str, scale: float, this: str, other: str) -> Read:
    """How much more one row of a benchmark has than another; rows by their `name`."""
    first, second = row(name, key, scale, name=this), row(name, key, scale, name=other)
    return lambda results: first(results) - second(results)


def value(name: str, key: str, scale: float = 1.0) -> Read:
    """A number of a JSON file; NaN for null, which is what could not be found out."""

    def read(results: Results) -> float:
        found = _dig(results.json(name), key)
        return math.nan if found is None else scale * float(found)

    return read


def recorded(cell: str, key: str, scale: float = 1.0) -> Read:
    """A number of a run's record."""
    return lambda results: scale * float(_dig(results.record(cell), key))


def is_recorded(cell: str, /, **values: Any) -> Read:
    """1 if the record holds these values, else 0."""

    def read(results: Results) -> float:
        record = results.record(cell)
        return float(all(record[key] == value for key, value in values.items()))

    return read


def says(name: str, pattern: str) -> Read:
    """1 if the output has a match of `pattern`, else 0."""
    return lambda results: float(re.search(pattern, results.output(name)) is not None)


def printed(name: str, pattern: str) -> Read:
    """The number in the group of the last match of `pattern` in the output; 0 without one."""

    def read(results: Results) -> float:
        found = re.findall(pattern, results.output(name))
        return float(found[-1]) if found else 0.0

    return read


def ended(name: str, key: str) -> Read:
    """A number of how the command ended."""
    return lambda results: float(results.ended(name)[key])


def seen(name: str, key: str) -> Read:
    """A number of processes that nvidia-smi saw; NaN where it shows none, as in a container."""
    return lambda results: float(results.ended(name)[key] or math.nan)


def per_step(longer: str, shorter: str, pattern: str, steps: int) -> Read:
    """Matches that a run of `steps` more steps prints more, in each of these steps."""

    def read(results: Results) -> float:
        counts = [len(re.findall(pattern, results.output(name))) for name in (longer, shorter)]
        return (counts[0] - counts[1]) / steps

    return read


def layers_ms(name: str) -> Read:
    """Forward and backward of all layers by lab.profile_layers, as it printed them."""
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
