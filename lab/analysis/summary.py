"""The table of a study: as CSV, and as text for a terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.records import CONTEXT, Study
from lab.analysis.speedup import CEILING, Row, leaders, unit_of
from lab.measure.intervals import ENOUGH_REPEATS, Interval
from lab.task.metrics import heading, main_metric


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Write one line per row; empty fields were not measured.

    An interval has three columns, `<name>_lo`, `<name>_mid` and `<name>_hi`; a phase one,
    `<name>_s`; a status one, `num_<status>`, which counts throughput and breakdown runs.
    """
    pd.DataFrame([_flat(row) for row in rows]).to_csv(path, index=False)


def text(rows: Sequence[Row], study: Study) -> str:
    """Write the table, the leaders at each point, and the failures."""
    parts = [
        *(_table(rows) if rows else ()),
        *_advice(rows),
        "\n".join(_leader_lines(rows)),
        "\n".join(_trouble(study)),
    ]
    return "\n\n".join(part for part in parts if part)


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Interval):
            flat |= {f"{field.name}_{end}": getattr(value, end) for end in ("lo", "mid", "hi")}
        elif field.name == "phases_s":
            flat |= {f"{name}_s": seconds for name, seconds in value.items()}
        elif field.name == "statuses":
            flat |= {f"num_{status}": count for status, count in value.items()}
        elif field.name == "final":
            flat |= value
        elif field.name == "settings":
            flat |= {key: value.get(key) for key in CONTEXT}
        else:
            flat[field.name] = value
    return flat | {"emulation": row.emulation or "none", "transform": row.transform or "none"}


def _table(rows: Sequence[Row]) -> tuple[str, ...]:
    """Write values that all rows share as one line, and the other columns as a table.

    No two rows share all columns; a single row is one line.
    """
    unit = unit_of(rows)
    metric = main_metric(name for row in rows for name in row.final)
    shown = [_shown(row, unit, metric) for row in rows]
    common = {k: v for k, v in shown[0].items() if all(one[k] == v for one in shown)}
    line = ", ".join(f"{key} {value}" for key, value in common.items())
    if len(rows) == 1:
        return (line,)
    columns = pd.DataFrame([{k: v for k, v in one.items() if k not in common} for one in shown])
    return f"all: {line}", columns.to_string(index=False)


def _shown(row: Row, unit: str, metric: str) -> dict[str, str]:
    title, factor = heading(metric)
    bad = [f"{count} {name}" for name, count in row.statuses.items() if count and name != "done"]
    return {
        "series": row.series,
        "N": str(row.world_size),
        "batch": str(row.fixed_batch_size),
        "scaling": row.scaling,
        "n": str(row.num_repeats),
        "step ms": _value(row.step_s, 1e3),
        "mad": _value(row.step_mad_s, 1e3),
        f"{unit}s/s": _value(row.samples_per_s.mid),
        "speedup": _interval(row.speedup),
        "efficiency": _interval(row.efficiency),
        "exposed ms": _interval(row.exposed_exchange_s, 1e3),
        "payload MB": _value(row.payload_max_bytes, 1e-6),
        title: _value(row.final.get(metric, math.nan), factor),
        "baseline": row.baseline or "-",
        "runs": ", ".join([f"{row.statuses['done']} done", *bad]),
        "emulation": row.emulation or "none",
    }


def _value(value: float, scale: float = 1.0) -> str:
    return "-" if math.isnan(value) else f"{value * scale:.4g}"


def _interval(value: Interval, scale: float = 1.0) -> str:
    middle = "-" if math.isnan(value.mid) else f"{value.mid * scale:.2f}"
    if math.isnan(value.lo):
        return middle
    return f"{middle} [{value.lo * scale:.2f}, {value.hi * scale:.2f}]"


def _advice(rows: Iterable[Row]) -> list[str]:
    counts = {row.num_repeats for row in rows if row.num_repeats}
    if not counts or min(counts) >= ENOUGH_REPEATS:
        return []
    return [
        f"Some points have fewer than {ENOUGH_REPEATS} repeats (n): their intervals are narrower "
        "than the 95 % they are named after, and one repeat gives none."
    ]


def _leader_lines(rows: Iterable[Row]) -> list[str]:
    """Write a line per scaling, batch, world size, model and machine; only such runs compete."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        context = (row.transform, *(row.settings.get(key) for key in CONTEXT))
        groups.setdefault((row.scaling, row.fixed_batch_size, row.world_size, context), []).append(
            row
        )
    lines = [_leader_line(group) for group in groups.values()]
    return [line for line in lines if line]


def _leader_line(rows: list[Row]) -> str:
    competing = {row.series for row in rows if row.num_repeats and row.strategy != CEILING}
    if len(competing) < 2 or max(row.num_repeats for row in rows) < 2:
        return ""  # one repeat has no interval, so nothing can be told apart
    one, names = rows[0], leaders(rows)
    role = "leader" if len(names) == 1 else "leaders, not told apart"
    model = f" with {one.transform}" if one.transform else ""
    place = f"N={one.world_size} {one.scaling} batch {one.fixed_batch_size}{model}"
    return f"{place}: {role}: {', '.join(names)}"


def _trouble(study: Study) -> list[str]:
    failed = [cell for cell in study.cells if cell.status != "done"]
    lines = [f"{c.status}: {c.name}: {c.error or 'no error was recorded'}" for c in failed]
    return [*lines, *(f"missing: {name}: left no record.json" for name in study.missing)]
