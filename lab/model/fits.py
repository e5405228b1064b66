"""Lines through a layer's times at several batches: part of a measured profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lab.settings import checks

ALL, REST = "(all layers)", "(rest)"
BOTH, STEP = "forward and backward", "step"
ENDS = ("median", "low", "high")

Interval = dict[str, float | None]


@dataclass(frozen=True)
class Fit:
    """The line time = fixed + per sample · batch of a layer, with 95 % intervals.

    Attributes:
        layer: its name; ALL for their sum, REST for what they leave of the step.
        way: forward or backward; of ALL it is BOTH, of REST it is STEP.
        fixed_ms, per_sample_ms: median, low and high; the ends are None after too few rounds.
    """

    layer: str
    way: str
    fixed_ms: Interval
    per_sample_ms: Interval

    def scaled(self, factor: float) -> Fit:
        """Return the line of a device whose times are `factor` times as long."""

        def slower(times: Interval) -> Interval:
            return {key: value and factor * value for key, value in times.items()}

        return replace(
            self, fixed_ms=slower(self.fixed_ms), per_sample_ms=slower(self.per_sample_ms)
        )

    def __str__(self) -> str:
        """Return its line of a profile's file."""
        times = (f"{key}: {_flow(getattr(self, key))}" for key in ("fixed_ms", "per_sample_ms"))
        return f'  - {{layer: "{self.layer}", way: {self.way}, {", ".join(times)}}}\n'


def fit_of(where: str, node: Any) -> Fit:
    """Parse one line of a profile's `fits`.

    Raises:
        ValueError: it is none; the message begins with `where`.
    """
    keys = [field.name for field in fields(Fit)]
    if not isinstance(node, Mapping) or set(node) != set(keys):
        raise ValueError(f"{where}: must have the keys {', '.join(keys)}")
    for key in ("fixed_ms", "per_sample_ms"):
        _check(f"{where}.{key}", node[key])
    fixed_ms, per_sample_ms = dict(node["fixed_ms"]), dict(node["per_sample_ms"])
    return Fit(node["layer"], node["way"], fixed_ms, per_sample_ms)


def _check(where: str, times: Any) -> None:
    if not isinstance(times, Mapping) or set(times) != set(ENDS):
        raise ValueError(f"{where}: must have the keys {', '.join(ENDS)}")
    for key in ENDS:
        value = times[key]
        if value is not None and (not checks.is_number(value) or value < 0):
            raise ValueError(f"{where}.{key}={value}: must be null or a number of at least 0")


def _flow(times: Interval) -> str:
    parts = (
        f"{key}: {'null' if times[key] is None else format(times[key], '.6g')}" for key in ENDS
    )
    return f"{{{', '.join(parts)}}}"
