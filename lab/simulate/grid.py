"""Predict a grid of cells."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lab.measure.spans import Span
from lab.settings.errors import ConfigError
from lab.settings.names import AXES
from lab.simulate.calibrate import calibrate
from lab.simulate.fit import Group
from lab.simulate.request import Request, plain
from lab.simulate.step import Prediction, Strategy, predict
from lab.study.grid import Cell


def predicted(request: Request) -> tuple[dict[str, Any], tuple[Span, ...]]:
    """Return the result, a row per cell and their hardware, and the spans of the last cell.

    Raises:
        ConfigError: a strategy has no cost model, the hardware has too few ranks, or the study to
            fit to cannot be read or does not fit.
    """
    try:
        return _predicted(request)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None


def _predicted(request: Request) -> tuple[dict[str, Any], tuple[Span, ...]]:
    strategies = [Strategy.of(plain(cell.config)) for cell in request.cells]
    groups = _groups(request)
    rows, spans = [], ()
    for group in groups:
        for cell, profile, strategy in zip(
            request.cells, request.profiles, strategies, strict=True
        ):
            weak = cell.config.scaling == "weak"
            point = strategy, cell.world_size, cell.batch_size
            prediction = predict(profile, group.hardware, *point, weak)
            spans = prediction.step.spans
            series = " ".join([_series(cell, request.cells), *group.conditions.split()])
            score = group.of(profile, *point, prediction.step.step_s)
            row = _row(cell, series, prediction)
            rows.append(row | {"conditions": group.conditions} | score)
    result = {
        "rows": rows,
        "profiles": {profile.name: profile.gradient_bytes for profile in request.profiles},
        "hardware": [{"conditions": g.conditions, **asdict(g.hardware)} for g in groups],
        "fit": str(request.fit) if request.fit else None,
    }
    return result, spans


def _groups(request: Request) -> tuple[Group, ...]:
    """Return the hardware to predict on: as its file says, or fitted."""
    if request.fit and request.fit.suffix != ".json":
        from lab.simulate.score import fitted_groups  # Imports pandas.

        return fitted_groups(request.fit, request.profiles[0], request.hardware)
    hardware = request.hardware
    return (Group("", (), calibrate(request.fit, hardware) if request.fit else hardware),)


def _row(cell: Cell, series: str, prediction: Prediction) -> dict[str, Any]:
    return {
        "series": series,
        "strategy": cell.strategy,
        "world_size": cell.world_size,
        "batch_size": cell.batch_size,
        "per_rank_batch_size": cell.batch_size // cell.world_size,
        "scaling": cell.config.scaling,
        "step_s": prediction.step.step_s,
        "exposed_s": prediction.exposed_s,
        "speedup": prediction.speedup,
        "efficiency": prediction.efficiency,
        "payload_bytes": prediction.step.payload_bytes,
        "evidence": "extrapolated",
    }


def _series(cell: Cell, cells: list[Cell]) -> str:
    """Name the series: the strategy, and the settings in which cells differ."""
    varying = [
        f"{key}={value}"
        for key, value in cell.variant.items()
        if key not in AXES and any(other.variant.get(key) != value for other in cells)
    ]
    return " ".join([cell.strategy, *varying])
