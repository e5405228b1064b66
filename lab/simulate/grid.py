"""Predict a grid of cells."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lab.measure.spans import Span
from lab.settings.errors import ConfigError
from lab.settings.names import AXES
from lab.simulate.calibrate import calibrate
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
    hardware, score = request.hardware, None
    if request.fit and request.fit.suffix == ".json":
        hardware = calibrate(request.fit, hardware)
    elif request.fit:
        from lab.simulate.score import Score  # Imports pandas.

        score = Score(request.fit, request.profiles[0], request.hardware)
        hardware = score.hardware
    rows, spans = [], ()
    for cell, profile, strategy in zip(request.cells, request.profiles, strategies, strict=True):
        weak = cell.config.scaling == "weak"
        point = strategy, cell.world_size, cell.batch_size
        prediction = predict(profile, hardware, *point, weak)
        spans = prediction.step.spans
        row = _row(cell, _series(cell, request.cells), prediction)
        rows.append(row | (score.of(profile, *point, prediction.step.step_s) if score else {}))
    result = {
        "rows": rows,
        "profiles": {profile.name: profile.gradient_bytes for profile in request.profiles},
        "hardware": asdict(hardware),
        "fit": str(request.fit) if request.fit else None,
    }
    return result, spans


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
