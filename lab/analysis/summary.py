"""The table of a study: as CSV, and as text for a terminal."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize

from lab.analysis.export import without_formulas
from lab.analysis.leaders import leaders
from lab.analysis.noise import floor_text
from lab.analysis.records import Study
from lab.analysis.series import CONTEXT
from lab.analysis.speedup import CEILING, Row, prediction_of, shared_runs, unit_of
from lab.analysis.target import TimeToTarget
from lab.measure.intervals import ENOUGH_REPEATS, UNKNOWN, Interval, student
from lab.task.metrics import heading, main_metric
from lab.task.metrics import shown as shown_value

UNMEASURED = "-"


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Write one line per row; empty fields were not measured.

    An interval has three columns, `<name>_lo`, `<name>_mid` and `<name>_hi`; a phase one,
    `<name>_s`; a status one, `num_<status>`, which counts throughput and breakdown runs.
    """
    without_formulas(frame_of(rows)).to_csv(path, index=False)


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the same table, a line for each row; NaN: not measured."""
    return pd.DataFrame([_flat(row) for row in rows])


def text(rows: Sequence[Row], study: Study, floor: float = math.nan) -> str:
    """Write the table, the leaders at each point, and the failures.

    Args:
        floor: the study's noise floor (lab.analysis.noise); NaN if unknown.
    """
    parts = [
        *(_table(rows) if rows else ()),
        "\n".join(f"on={label}: {text}" for label, text in study.machines.items()),
        "\n".join(line for line in (shared_runs(rows), *_advice(rows)) if line),
        "\n".join(_scalability_lines(rows)),
        "\n".join(line for line in (floor_text(floor), *leader_lines(rows, floor)) if line),
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
        elif field.name == "steps_s":
            flat["step_s"] = row.step_s
        elif field.name in ("speedups", "context", "hosts"):
            pass  # columns hold the settings themselves
        elif field.name == "settings":
            flat |= {key: value.get(key) for key in CONTEXT}
        else:
            flat[field.name] = value
    return flat | {"emulation": row.emulation or "none", "transform": row.transform or "none"}


def _table(rows: Sequence[Row]) -> tuple[str, ...]:
    """Write values that all rows share as one line, and the other columns as a table.

    No two rows share all columns; a single row is one line.
    """
    unit, predictions = unit_of(rows), prediction_of(rows)
    metric = main_metric(name for row in rows for name in row.final)
    shown = [_shown(row, unit, predictions, metric) for row in rows]
    for column in ("TFLOP/s", "MFU %"):  # which only counted models have
        if all(one[column] == UNMEASURED for one in shown):
            shown = [{k: v for k, v in one.items() if k != column} for one in shown]
    common = {k: v for k, v in shown[0].items() if all(one[k] == v for one in shown)}
    line = ", ".join(f"{key} {value}" for key, value in common.items())
    if len(rows) == 1:
        return (line,)
    columns = pd.DataFrame([{k: v for k, v in one.items() if k not in common} for one in shown])
    return f"all: {line}", columns.to_string(index=False)


def _shown(row: Row, unit: str, predictions: tuple[str, int], metric: str) -> dict[str, str]:
    prediction, each = predictions
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
        **({f"{prediction}s/s": _value(row.samples_per_s.mid, each)} if each > 1 else {}),
        "TFLOP/s": _value(row.flops_per_s, 1e-12),
        "MFU %": _value(row.mfu, 100),
        "speedup": _interval(row.speedup),
        "efficiency": _interval(row.efficiency),
        "exposed ms": _interval(row.exposed_exchange_s, 1e3),
        "payload MB": _value(row.payload_max_bytes, 1e-6),
        title: _value(row.final.get(metric, math.nan), factor),
        "baseline": row.baseline or "-",
        "runs": ", ".join([f"{row.statuses['done']} done", *bad]),
        "emulation": row.emulation or "none",
    }


def target_table(found: Sequence[TimeToTarget], target: float) -> str:
    """Write the time that each point took to reach a target; empty without evaluations."""
    if not found:
        return ""
    lines = [
        {
            "series": each.point.one.series,
            "N": str(each.point.one.world_size),
            "batch": str(each.point.one.fixed_batch_size),
            "seconds": _interval(each.seconds),
            "steps": str(each.steps or "-"),
            "reached": f"{each.num_reached} of {each.num_runs}",
        }
        for each in found
    ]
    title = f"time to {found[0].metric} {shown_value(found[0].metric, target)}:"
    return "\n".join([title, pd.DataFrame(lines).to_string(index=False)])


def _value(value: float, scale: float = 1.0) -> str:
    return UNMEASURED if math.isnan(value) else f"{value * scale:.4g}"


def _interval(value: Interval, scale: float = 1.0) -> str:
    middle = UNMEASURED if math.isnan(value.mid) else f"{value.mid * scale:.2f}"
    if math.isnan(value.lo):
        return middle
    return f"{middle} [{value.lo * scale:.2f}, {value.hi * scale:.2f}]"


def _advice(rows: Iterable[Row]) -> list[str]:
    counts = {row.num_repeats for row in rows if row.num_repeats}
    if not counts or min(counts) >= ENOUGH_REPEATS:
        return []
    return [f"Points of fewer than {ENOUGH_REPEATS} repeats (n) have no interval and no rank."]


def _scalability_lines(rows: Sequence[Row]) -> list[str]:
    """Write a table of the serial fraction by ranks, and of the Universal Scalability Law."""
    found = scalability(rows)
    if not found:
        return []
    sizes = sorted({size for one in found for size in one.serial_fraction})
    lines = [
        {
            "series": one.series,
            "batch": str(one.batch_size),
            **{f"e({n})": _interval(one.serial_fraction.get(n, UNKNOWN)) for n in sizes},
            "sigma": _interval(one.contention),
            "kappa": _interval(one.coherency),
            "best N": f"{one.best_size:.0f}" if math.isfinite(one.best_size) else "-",
        }
        for one in found
    ]
    title = "serial fraction e(N) (Karp-Flatt), and S = N / (1 + sigma (N-1) + kappa N (N-1)):"
    return [title, pd.DataFrame(lines).to_string(index=False)]


def leader_lines(rows: Iterable[Row], floor: float) -> list[str]:
    """Write a line for each context and world size; only runs that share them compete."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.world_size, *row.context), []).append(row)
    lines = [_leader_line(group, floor) for group in groups.values()]
    return [line for line in lines if line]


def _leader_line(rows: list[Row], floor: float) -> str:
    competing = {row.series for row in rows if row.num_repeats and row.strategy != CEILING}
    if len(competing) < 2 or max(row.num_repeats for row in rows) < ENOUGH_REPEATS:
        return ""  # without intervals nothing can be told apart
    one, names = rows[0], leaders(rows, floor)
    role = "leader" if len(names) == 1 else "leaders, not told apart"
    model = f" with {one.transform}" if one.transform else ""
    where = "".join(f" {key}={value}" for key, value in one.hosts.items())
    place = f"N={one.world_size} {one.scaling} batch {one.fixed_batch_size}{model}{where}"
    return f"{place}: {role}: {', '.join(names)}"


def _trouble(study: Study) -> list[str]:
    failed = [cell for cell in study.cells if cell.status != "done"]
    lines = [
        f"{c.status}: {study.name_of(c.folder)}: {c.error or 'no error was recorded'}"
        for c in failed
    ]
    return [*lines, *(f"missing: {name}: {why}" for name, why in study.missing.items())]


@dataclass(frozen=True)
class Scalability:
    """How one series scales at one batch, strong scaling; intervals are over repeats.

    Attributes:
        serial_fraction: by ranks, the experimentally determined serial fraction e of A. Karp and
            H. Flatt (CACM 33(5), 1990): (1 / S - 1 / N) / (1 - 1 / N). It is constant if Amdahl's
            law holds, and grows with N where communication does.
        contention, coherency: sigma and kappa of N. Gunther's law (2008),
            S = N / (1 + sigma (N - 1) + kappa N (N - 1)); all NaN with fewer than two numbers of
            ranks above one.
    """

    series: str
    batch_size: int
    serial_fraction: Mapping[int, Interval]
    contention: Interval
    coherency: Interval

    @property
    def best_size(self) -> float:
        """The number of ranks beyond which more of them slow down; infinite if there is none."""
        if self.coherency.mid <= 0:
            return math.inf
        return math.sqrt(max(0.0, 1 - self.contention.mid) / self.coherency.mid)


def scalability(rows: Iterable[Row]) -> list[Scalability]:
    """Compute the scalability of each series that has runs on several ranks."""
    groups: defaultdict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.scaling == "strong" and row.world_size > 1 and row.speedups:
            groups[row.series, row.batch_size, row.context].append(row)
    return [_scalability(group) for group in groups.values()]


def serial_fraction(speedup: float, size: int) -> float:
    """Return Karp and Flatt's e of a speedup on `size` ranks."""
    return (1 / speedup - 1 / size) / (1 - 1 / size)


def universal_law(speedups: Mapping[int, float]) -> tuple[float, float]:
    """Fit sigma and kappa, neither of them negative, to speedups by ranks.

    By least squares of N / S - 1 = sigma (N - 1) + kappa N (N - 1), which is linear in both.
    """
    sizes = np.array(list(speedups), dtype=float)
    terms = np.stack([sizes - 1, sizes * (sizes - 1)], axis=1)
    (sigma, kappa), _ = optimize.nnls(terms, sizes / np.array(list(speedups.values())) - 1)
    return float(sigma), float(kappa)


def _scalability(rows: Sequence[Row]) -> Scalability:
    fractions = {
        row.world_size: student(
            np.array([serial_fraction(s, row.world_size) for s in row.speedups.values()])
        )
        for row in rows
    }
    shared = set.intersection(*(set(row.speedups) for row in rows))
    fits = [universal_law({r.world_size: r.speedups[k] for r in rows}) for k in sorted(shared)]
    contention = coherency = UNKNOWN
    if len(rows) > 1 and fits:
        contention, coherency = (student(np.array(values)) for values in zip(*fits, strict=True))
    return Scalability(rows[0].series, rows[0].batch_size, fractions, contention, coherency)
