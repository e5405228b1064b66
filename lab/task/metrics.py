"""Metrics as evaluations hold them and people read them; no torch, so that reports can ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

WHEN = ("step", "seconds")  # the keys of an evaluation that are no metric
PERCENT = ("accuracy",)  # metrics that are shares, and shown in percent

Value = TypeVar("Value")


def metrics_of(evaluation: Mapping[str, Value]) -> dict[str, Value]:
    """Metrics of an evaluation by name, without when it took place."""
    return {name: value for name, value in evaluation.items() if name not in WHEN}


def axis(name: str) -> tuple[str, float]:
    """A metric's axis label, and the factor by which its values are drawn."""
    return (f"test {name} (%)", 100.0) if name in PERCENT else (f"test {name}", 1.0)


def shown(name: str, value: float) -> str:
    """A metric's value for people, as in "96.94 %"."""
    return f"{100 * value:.2f} %" if name in PERCENT else f"{value:.4g}"
