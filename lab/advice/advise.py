"""Advice as data: every option, ranked, and the first choices among exact and lossy ones."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lab.advice.accuracy import known_of
from lab.advice.command import train_command
from lab.advice.forecast import contenders, ranked
from lab.advice.options import Option, fitting, options_of
from lab.advice.request import Advice
from lab.settings.errors import ConfigError
from lab.simulate.fit import Group
from lab.simulate.grid import groups_of, sources_of
from lab.simulate.score import held_out, score, scored_cells
from lab.study.grid import Cell

Row = dict[str, Any]
KINDS = ("exact", "lossy")
NEXT_SETTING = re.compile(r" (?=[\w.]+=)")


def advised(advice: Advice) -> dict[str, Any]:
    """Predict and rank all options.

    Returns:
        `rows` (every option that fits the memory, the best first), and by kind, "exact" or
        "lossy": `best`, places in `rows` of each series' best option, with the efficiency that the
        target asks for; `contenders`, of those that the first cannot be told apart from.

    Raises:
        ConfigError: a strategy has no cost model, the hardware has too few ranks, or the study to
            fit to cannot be read.
    """
    request = advice.prediction
    try:
        group = _group(advice)
        options = options_of(advice, group)
        errors = score(held_out(scored_cells(group)))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    kept = fitting(options, group.hardware.memory_bytes)
    by_forecast = {id(one.forecast): one for one in kept}
    ordered = [by_forecast[id(each)] for each in ranked(one.forecast for one in kept)]
    known = (source.on(group.hardware) for source in sources_of(request))
    profiles = {profile.name: profile for profile in known}
    return {
        "target": asdict(advice.target),
        "knee": advice.knee,
        "top": advice.top,
        "rows": [_row(advice, group, option) for option in ordered],
        **_choices(ordered, advice.target.least_efficiency),
        "most_efficient": max((one.efficiency for one in kept), default=math.nan),
        "too_large": sorted({one.forecast.name for one in options} - _names(kept)),
        "profiles": {name: asdict(profile) for name, profile in profiles.items()},
        "hardware": {"conditions": group.conditions, **asdict(group.hardware)},
        "fit": str(request.fit) if request.fit else None,
        "errors": str(errors) if errors.num_cells else None,
    }


def _names(options: Sequence[Option]) -> set[str]:
    return {option.forecast.name for option in options}


def _choices(ordered: Sequence[Option], least_efficiency: float) -> dict[str, Any]:
    """Choose among the best options of each series, apart for exact and lossy ones."""
    places: dict[str, int] = {}
    for place, option in enumerate(ordered):
        if option.efficiency >= least_efficiency:
            places.setdefault(option.forecast.name, place)
    found: dict[str, Any] = {"best": {}, "contenders": {}}
    for kind in KINDS:
        best = [p for p in places.values() if ordered[p].forecast.lossy == (kind == "lossy")]
        of_place = {id(ordered[place].forecast): place for place in best}
        forecasts = [ordered[place].forecast for place in best]
        close = contenders(forecasts) if forecasts else []
        found["best"][kind] = best
        found["contenders"][kind] = [of_place[id(each)] for each in close]
    return found


def _row(advice: Advice, group: Group, option: Option) -> Row:
    cell, forecast, target = option.cell, option.forecast, advice.target
    total = target.total_samples(cell.config.epochs, cell.config.steps, cell.batch_size)
    hours = target.hours(forecast.seconds_per_sample, total)
    ranks_per_node = group.hardware.ranks_per_node
    units = target.units(cell.world_size, ranks_per_node)
    shortest_s, longest_s = forecast.interval_s
    cost = None
    if target.price_per_hour is not None:
        per_sample = target.price_per_hour * units * forecast.seconds_per_sample / 3600
        cost = per_sample * (1e6 if total is None else total)
    return {
        "series": forecast.name,
        "strategy": cell.strategy,
        "world_size": cell.world_size,
        "batch_size": cell.batch_size,
        "per_rank_batch_size": cell.batch_size // cell.world_size,
        "accumulate": cell.config.accumulate,
        "scaling": cell.config.scaling,
        "lossy": forecast.lossy,
        "step_s": forecast.steps_s[0],
        "step_s_interval": (shortest_s, longest_s),
        "samples_per_s": option.samples_per_s,
        "samples_per_s_interval": (cell.batch_size / longest_s, cell.batch_size / shortest_s),
        "efficiency": option.efficiency,
        "hours": hours,
        "cost": cost,
        "cost_of_samples": 1e6 if total is None else total,
        "memory_bytes": None if math.isnan(option.memory_bytes) else option.memory_bytes,
        "limit": option.limit[0],
        "limit_share": option.limit[1],
        "knee": option.knee,
        "accuracy": known_of(cell.strategy) if forecast.lossy else "that of one rank, to rounding",
        "command": train_command(cell, ranks_per_node),
    }


def _group(advice: Advice) -> Group:
    """Return the hardware to predict on: of a study's groups, the one that the cells belong to.

    Raises:
        ValueError: the study has several groups, of which the settings name none.
    """
    groups = groups_of(advice.prediction)
    if len(groups) == 1:
        return groups[0]
    cell = advice.prediction.cells[0]
    named = [group for group in groups if _runs_under(cell, group.conditions)]
    if len(named) != 1:
        known = "; ".join(group.conditions for group in groups)
        raise ValueError(
            f"fit={advice.prediction.fit}: has cells of several conditions, of which the settings "
            f"must name one: {known}"
        )
    return named[0]


def _runs_under(cell: Cell, conditions: str) -> bool:
    """Tell whether a cell's settings are those of a group; other keys are the machine's."""
    pairs = (text.partition("=") for text in NEXT_SETTING.split(conditions))
    settings = {key: str(value) for key, value in cell.settings.items()}
    return all(settings.get(key, value) == value for key, _, value in pairs)
