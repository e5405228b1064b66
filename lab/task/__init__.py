"""Tasks, and names and display of their metrics. Here nothing imports torch: reports use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

WHEN = ("step", "seconds")  # the keys of an evaluation that are not metrics
PERCENT = ("accuracy",)  # metrics that are shares, shown in percent
LOGARITHMIC = ("perplexity",)  # metrics that are powers of e, drawn on a logarithmic axis

Value = TypeVar("Value")


def metrics_of(evaluation: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in evaluation.items() if name not in WHEN}


def main_metric(names: Iterable[str]) -> str:
    """Name the metric to show where there is room for one: the first that is not the loss."""
    return next((name for name in names if name != "loss"), "loss")


def heading(name: str) -> tuple[str, float]:
    """Return a metric's table heading, and the factor on its values in tables."""
    return (f"{name} %", 100.0) if name in PERCENT else (name, 1.0)


def axis(name: str) -> tuple[str, float]:
    """Return a metric's axis label, and the factor on its values in figures."""
    return (f"test {name} (%)", 100.0) if name in PERCENT else (f"test {name}", 1.0)


def shown(name: str, value: float) -> str:
    """Return a metric's value as text, such as "96.94 %"."""
    if name in PERCENT:
        return f"{100 * value:.2f} %"
    return f"{value:.2f}" if name in LOGARITHMIC else f"{value:.4g}"
