"""Predict a grid of cells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from statistics import median
from typing import Any

from lab.measure.spans import Span
from lab.model.profile import Profile
from lab.settings.errors import ConfigError
from lab.settings.names import AXES
from lab.simulate.calibrate import calibrate
from lab.simulate.fit import DRAWS, Group
from lab.simulate.presets import draws, places
from lab.simulate.request import Request, plain
from lab.simulate.score import ScoredCell, held_out, score, scored_cell
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
    points = list(zip(request.cells, request.profiles, strategies, strict=True))
    groups = groups_of(request)
    rows, scores, spans = [], [], ()
    for group in groups:
        scored = []
        for cell, profile, strategy in points:
            prediction, row = _predict(group, cell, profile, strategy)
            observed = group.observed(profile, strategy, cell.world_size, _per_rank(cell))
            scored += [scored_cell(group, observed)] if observed else []
            series = " ".join([series_of(cell, request.cells), *group.conditions.split()])
            rows.append({"series": series, **row, **_measured(scored[-1] if observed else None)})
            spans = prediction.step.spans
        found = score(held_out(scored))
        scores.append({"conditions": group.conditions, **asdict(found), "text": str(found)})
    result = {
        "rows": rows,
        "profiles": {profile.name: profile.gradient_bytes for profile in request.profiles},
        "hardware": [{"conditions": g.conditions, **asdict(g.hardware)} for g in groups],
        "scores": scores,
        "fit": str(request.fit) if request.fit else None,
    }
    return result, spans


def groups_of(request: Request) -> tuple[Group, ...]:
    """Return the hardware to predict on: as its file says, or fitted."""
    if request.fit and request.fit.suffix != ".json":
        from lab.simulate.observe import fitted_groups  # Imports pandas.

        return fitted_groups(request.fit, request.profiles[0], request.hardware)
    hardware = request.hardware
    if request.fit:
        hardware = calibrate(request.fit, hardware)
    return (Group("", (), hardware, tuple(draws(hardware, DRAWS)), fitted=False),)


def _predict(
    group: Group, cell: Cell, profile: Profile, strategy: Strategy
) -> tuple[Prediction, dict[str, Any]]:
    """Predict a cell, and what the hardware's open values make of it."""
    point = strategy, cell.world_size, cell.batch_size, cell.config.scaling == "weak"
    prediction = predict(profile, group.hardware, *point)
    drawn = map(profile.drawn, places(len(group.draws)))
    others = zip(drawn, group.draws, strict=True)
    all_of_them = [prediction, *(predict(each, other, *point) for each, other in others)]
    return prediction, {
        "conditions": group.conditions,
        "strategy": cell.strategy,
        "world_size": cell.world_size,
        "batch_size": cell.batch_size,
        "per_rank_batch_size": _per_rank(cell),
        "scaling": cell.config.scaling,
        "step_s": prediction.step.step_s,
        "step_s_interval": _ends(each.step.step_s for each in all_of_them),
        "exposed_s": prediction.exposed_s,
        "exposed_s_interval": _ends(each.exposed_s for each in all_of_them),
        "speedup": prediction.speedup,
        "speedup_interval": _ends(each.speedup for each in all_of_them),
        "efficiency": prediction.efficiency,
        "payload_bytes": prediction.step.payload_bytes,
    }


def _ends(values: Iterable[float]) -> tuple[float, float]:
    known = sorted(values)
    return known[0], known[-1]


def _measured(scored: ScoredCell | None) -> dict[str, Any]:
    """Return what was measured of a cell, and the errors of its prediction."""
    if scored is None:
        return {"evidence": "extrapolated"}
    exposed_s, _ = scored.exposed_s
    return {
        "measured_s": median(scored.measured_s),
        "error": scored.error,
        "measured_exposed_s": exposed_s,
        "exposed_error": scored.exposed_error,
        "evidence": scored.evidence,
    }


def _per_rank(cell: Cell) -> int:
    return cell.batch_size // cell.world_size


def series_of(cell: Cell, cells: list[Cell]) -> str:
    """Name the series: the strategy, and the settings in which cells differ."""
    varying = [
        f"{key}={value}"
        for key, value in cell.variant.items()
        if key not in AXES and any(other.variant.get(key) != value for other in cells)
    ]
    return " ".join([cell.strategy, *varying])
