"""Predict a grid of cells, and compare predictions with what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from lab.measure.spans import Span
from lab.model.profile import Profile
from lab.record.schema import Record, read_record
from lab.settings.errors import ConfigError
from lab.settings.names import AXES, root_of
from lab.simulate.fit import DRAWS, Group, ScoredCell, calibrate, held_out, score, scored_cell
from lab.simulate.presets import draws, places
from lab.simulate.request import Request, plain
from lab.simulate.source import Estimate, Source, source_of
from lab.simulate.step import Prediction, predict
from lab.simulate.strategy import Strategy
from lab.study.grid import Cell

# Settings that decide what a step computes and exchanges; a profile says nothing of it.
ROOTS = (
    *("model", "data", "task", "transform", "exchange", "sync", "overlap", "bucket_mb"),
    *("precision", "tf32", "channels_last", "compile"),
)


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
    sources = zip(request.cells, sources_of(request), strict=True)
    points = [(cell, source, strategy_of(cell, source)) for cell, source in sources]
    groups = groups_of(request)
    known: dict[str, Profile] = {}
    rows, scores, spans = [], [], ()
    for group in groups:
        scored = []
        for cell, source, strategy in points:
            profile = source.on(group.hardware)
            known[profile.name] = profile
            prediction, row = _predict(group, cell, source, strategy)
            observed = group.observed(profile, strategy, cell.world_size, _per_rank(cell))
            scored += [scored_cell(group, observed)] if observed else []
            series = " ".join([series_of(cell, request.cells), *group.conditions.split()])
            rows.append({"series": series, **row, **_measured(scored[-1] if observed else None)})
            spans = prediction.step.spans
        found = score(held_out(scored))
        scores.append({"conditions": group.conditions, **asdict(found), "text": str(found)})
    result = {
        "rows": rows,
        "profiles": {name: profile.gradient_bytes for name, profile in known.items()},
        "sources": {name: profile.source for name, profile in known.items()},
        "by_default": request.by_default,
        "hardware": [{"conditions": g.conditions, **asdict(g.hardware)} for g in groups],
        "scores": scores,
        "fit": str(request.fit) if request.fit else None,
        "measured": str(request.measured) if request.measured else None,
    }
    if request.measured:
        steps = measured_steps(request.measured, request.cells)
        for row, seconds in zip(rows, steps, strict=True):
            row.update(comparison(seconds, row["step_s"]) if seconds else {})
    return result, spans


def sources_of(request: Request) -> list[Source]:
    """Return the source of each cell's times."""
    return [
        source_of(cell.config, profile, (_per_rank(cell), cell.batch_size))
        for cell, profile in zip(request.cells, request.profiles, strict=True)
    ]


def strategy_of(cell: Cell, source: Source) -> Strategy:
    """Read a cell's strategy; what is counted includes the transform, a profile cannot."""
    counted = {"transform": {}} if isinstance(source, Estimate) else {}
    return Strategy.of({**plain(cell.config), **counted})


def groups_of(request: Request) -> tuple[Group, ...]:
    """Return the hardware to predict on: as its file says, or fitted."""
    if request.fit and request.fit.suffix != ".json":
        from lab.simulate.observe import fitted_groups  # Imports pandas.

        assert request.profiles[0]  # or the request would have been refused
        return fitted_groups(request.fit, request.profiles[0], request.hardware)
    hardware = request.hardware
    if request.fit:
        hardware = calibrate(request.fit, hardware)
    return (Group("", (), hardware, tuple(draws(hardware, DRAWS)), fitted=False),)


def _predict(
    group: Group, cell: Cell, source: Source, strategy: Strategy
) -> tuple[Prediction, dict[str, Any]]:
    """Predict a cell, and what the hardware's open values make of it."""
    point = strategy, cell.world_size, cell.batch_size, cell.config.scaling == "weak"
    prediction = predict(source.on(group.hardware), group.hardware, *point)
    drawn = zip(places(len(group.draws)), group.draws, strict=True)
    others = (predict(source.on(each).drawn(place), each, *point) for place, each in drawn)
    all_of_them = [prediction, *others]
    across_bytes = prediction.step.across_bytes
    return prediction, {
        "conditions": group.conditions,
        "basis": source.basis,
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
        "across_bytes": None if math.isnan(across_bytes) else across_bytes,
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


def measured_steps(folder: Path, cells: Sequence[Cell]) -> list[tuple[float, ...]]:
    """Return the step time of each repeat that was measured of each cell; () of a cell without.

    Raises:
        ValueError: the folder holds no record, or one that breaks the contract.
    """
    records = [read_record(path) for path in sorted(folder.glob("*/record.json"))]
    if not records:
        raise ValueError(f"measured={folder}: holds no <cell>/record.json")
    times: dict[str, list[float]] = {}
    for record in records:
        if record.status == "done" and record.measure == "throughput" and record.step_s:
            times.setdefault(_point(record), []).append(record.step_s.median)
    return [tuple(times.get(_point(cell), ())) for cell in cells]


def comparison(seconds: Sequence[float], predicted_s: float) -> dict[str, Any]:
    """Return the columns of a row whose cell was measured."""
    step_s = median(seconds)
    return {"measured_s": step_s, "error": predicted_s / step_s - 1, "evidence": "measured"}


def summary(rows: Sequence[dict[str, Any]], folder: str) -> str:
    """Say how far predictions are from what was measured."""
    errors = [abs(row["error"]) for row in rows if row["evidence"] == "measured"]
    if not errors:
        return f"measured={folder}: has no cell of these settings"
    return (
        f"against {len(errors)} measured cells of {folder}: median error "
        f"{100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %"
    )


def _point(of: Record | Cell) -> str:
    """Return what a measured cell and a predicted one must have in common."""
    work = sorted((key, value) for key, value in of.settings.items() if root_of(key) in ROOTS)
    return repr((of.strategy, of.world_size, of.batch_size, work))
