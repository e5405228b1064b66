"""The tables of a study: as CSV and Parquet, and as text for a terminal."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis.charts import emulation_text
from lab.analysis.points import (
    CEILING,
    Point,
    floor_text,
    frame_of,
    has_ranking,
    leaders,
    together,
)
from lab.analysis.records import RecordedCell, RecordedStudy
from lab.draw.text import short_text
from lab.measure.statistics import ENOUGH_REPEATS, UNKNOWN, Interval, of_level, student
from lab.settings.names import flat
from lab.settings.storage import write_atomically
from lab.task import PERCENT, heading, main_metric, metrics_of
from lab.task import shown as shown_value

UNMEASURED = "-"
WIDTH = 110  # letters of a table's line
# Columns that a wider table leaves out, one after the other: summary.csv has the values of all.
SPARE = ("mad", "TFLOP/s", "efficiency", "MFU %", "baseline", "payload MB")
ONE_BY_ONE = (
    "each line about leaders is a separate test: if all series are equally fast, one of them is "
    "wrongly excluded in up to 5 % of such lines"
)
FORMULA = re.compile(r"[=+@\t\r]|-(?!\s*[\d.])")  # how one begins; and not -1


def write_csv(points: Iterable[Point], path: Path) -> None:
    """Write a line per point; empty fields were not measured.

    An interval has three columns, `<name>_lo`, `<name>_mid` and `<name>_hi`; a phase one,
    `<name>_s`; a status one, `num_<status>`, which counts throughput and breakdown runs.
    """
    table = without_formulas(frame_of(points))
    write_atomically(path, partial(table.to_csv, index=False))


def write_records(table: pd.DataFrame, out: Path) -> None:
    """Write a table of records as records.csv and records.parquet to the folder `out`.

    Raises:
        OSError: a file cannot be written.
    """
    write_atomically(out / "records.csv", partial(without_formulas(table).to_csv, index=False))
    write_atomically(out / "records.parquet", partial(table.to_parquet, index=False))


def records_table(study: RecordedStudy) -> pd.DataFrame:
    """Return a row per cell: its folder, its series, and each value of its record.

    A column is named by the value's dotted key (`step_s.median`, `settings.optim.lr`). Lists, such
    as evaluations and values by rank, are JSON text. An unknown value is missing. A column whose
    values have several types, as settings may, is text.
    """
    rows = [
        {
            "folder": study.name_of(cell.folder),
            "series": cell.series,
            **{
                key: json.dumps(value) if isinstance(value, list) else value
                for key, value in flat(cell.record.to_json()).items()
            },
        }
        for cell in study.cells
    ]
    table = pd.DataFrame(rows).convert_dtypes()
    for name in table.select_dtypes("object"):  # of several types, or unknown in all rows
        table[name] = table[name].map(_text, na_action="ignore").astype("string")
    return table


def without_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table in whose texts a spreadsheet finds no formula.

    Names come from others, and `=...` in one would be evaluated where the file is opened: an
    apostrophe before it makes it text. Numbers stay as they are.
    """
    texts = table.select_dtypes(["object", "string"])
    return table.assign(**{name: texts[name].map(_as_text, na_action="ignore") for name in texts})


def _as_text(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def text(points: Sequence[Point], study: RecordedStudy, floor: float = math.nan) -> str:
    """Write the table, the leaders at each point, and the failures.

    Args:
        floor: the study's noise floor (lab.analysis.points); NaN if unknown.
    """
    leaders_at = [line for group in together(points) if (line := _leader_line(group, floor))]
    parts = [
        *(_table(points) if points else ()),
        _lines(f"on={label}: {text}" for label, text in study.machines.items()),
        _lines([_emulated(points), shared_runs(points), _advice(points)]),
        "\n".join(_scalability_lines(points)),
        _lines([floor_text(floor), *leaders_at, ONE_BY_ONE if len(leaders_at) > 1 else ""]),
        "\n".join(f"{status}: {name}: {why}" for name, status, why in study.troubles),
    ]
    return "\n\n".join(part for part in parts if part)


def _lines(texts: Iterable[str]) -> str:
    """Write a text a line, and what is longer than WIDTH below it, indented."""
    wrapped = textwrap.TextWrapper(
        WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )
    return "\n".join(line for text in texts for line in wrapped.wrap(text))


def shared_runs(points: Iterable[Point]) -> str:
    """Say whose runs of one rank count for other series as well; empty if none do."""
    users: dict[str, dict[str, None]] = {}
    for point in points:
        if point.one_rank not in ("", point.series):
            users.setdefault(point.one_rank, {})[point.series] = None
    return "; ".join(
        f"the N=1 run of {name} is shared by {', '.join(others)}, because they compute the same"
        for name, others in users.items()
    )


def unit_of(points: Iterable[Point]) -> str:
    """Return the unit that all measured points share, in the singular, or "sample"."""
    units = {point.one.record.unit for point in points if point.num_repeats}
    return units.pop() if len(units) == 1 else "sample"


def prediction_of(points: Iterable[Point]) -> tuple[str, int]:
    """Return the name and the number per sample of the predictions of all measured points.

    The number is 1 if they differ.
    """
    measured = [point.one.record for point in points if point.num_repeats]
    kinds = {(one.prediction, one.predictions_per_sample) for one in measured}
    return kinds.pop() if len(kinds) == 1 else ("prediction", 1)


def runs_text(point: Point) -> str:
    """Count the runs of a point by how they ended."""
    bad = [f"{count} {name}" for name, count in point.statuses.items() if count and name != "done"]
    return ", ".join([f"{point.statuses['done']} done", *bad])


def target_table(points: Iterable[Point], target: float) -> str:
    """Write when each point's runs first reached `target`, as `eval_every` resolves it.

    The metric is the first that is not the loss; shares, such as accuracy, must rise to the
    target, all else must fall to it. Seconds are of training, without evaluations, and steps
    those of the run that took the most. Both are unknown if a run did not reach the target, because
    those of the others would flatter.

    Args:
        target: in the metric's own unit: 0.9 is an accuracy of 90 %.

    Returns:
        An empty text without evaluations.
    """
    lines, metric = list[dict[str, str]](), ""
    for point in points:
        runs = [cell for cell in point.done("throughput").values() if cell.record.evaluations]
        if not runs:
            continue
        own = main_metric(metrics_of(runs[0].record.evaluations[0]))
        metric = metric or own
        reached = [when for run in runs if (when := _first(run, own, target))]
        all_did = len(reached) == len(runs)
        seconds = of_level([s for s, _ in reached]) if all_did else UNKNOWN
        lines.append(
            {
                "series": point.series,
                "N": str(point.world_size),
                "batch": str(point.fixed_batch_size),
                "seconds": f"{seconds:.2f}",
                "steps": str(max(step for _, step in reached)) if all_did else UNMEASURED,
                "reached": f"{len(reached)} of {len(runs)}",
            }
        )
    title = f"time to {metric} {shown_value(metric, target)}:"
    return "\n".join([title, pd.DataFrame(lines).to_string(index=False)]) if lines else ""


def _first(run: RecordedCell, metric: str, target: float) -> tuple[float, int] | None:
    """Return seconds and step of the first evaluation that reached the target."""
    for evaluation in run.record.evaluations:
        value, seconds, step = (evaluation.get(key) for key in (metric, "seconds", "step"))
        if value is None or seconds is None or step is None:
            continue
        if (value >= target) if metric in PERCENT else (value <= target):
            return seconds, int(step)
    return None


def _table(points: Sequence[Point]) -> tuple[str, ...]:
    """Write values that all points share as one line, and the other columns as a table.

    No two points share all columns; a single one is a line.
    """
    unit, predictions = unit_of(points), prediction_of(points)
    metric = main_metric(name for point in points for name in point.final)
    shown: Any = pd.DataFrame([_shown(point, unit, predictions, metric) for point in points])
    for column in ("TFLOP/s", "MFU %"):  # which only counted models have
        if (shown[column] == UNMEASURED).all():
            shown = shown.drop(columns=column)
    values = {str(column): set(shown[column]) for column in shown}
    values["baseline"] = values["baseline"] - {UNMEASURED} or {UNMEASURED}  # a dash has no speedup
    common = {key: one for key, (one, *others) in values.items() if not others}
    line = ", ".join(f"{key} {value}" for key, value in common.items())
    if len(points) == 1:
        return (line,)
    return f"all: {line}", _fitting(shown.drop(columns=[*common]), SPARE)


def _fitting(columns: Any, spare: Sequence[str]) -> str:
    """Write a table of at most WIDTH letters a line, as far as leaving out `spare` columns does."""
    left = [name for name in spare if name in columns]
    out = list[str]()
    while left and len(columns.to_string(index=False).partition("\n")[0]) > WIDTH:
        out.append(left.pop(0))
        columns = columns.drop(columns=out[-1])
    note = f"\nleft out, as the table would be too wide: {', '.join(out)}" if out else ""
    return columns.to_string(index=False) + note


def _shown(point: Point, unit: str, predictions: tuple[str, int], metric: str) -> dict[str, str]:
    prediction, each = predictions
    title, factor = heading(metric)
    return {
        "series": point.series,
        "N": str(point.world_size),
        "batch": str(point.fixed_batch_size),
        "scaling": point.scaling,
        "n": str(point.num_repeats),
        "step ms": _value(point.step_s, 1e3),
        "mad": _value(point.median("step_mad_s"), 1e3),
        f"{unit}s/s": _value(point.samples_per_s.mid),
        **({f"{prediction}s/s": _value(point.samples_per_s.mid, each)} if each > 1 else {}),
        "TFLOP/s": _value(point.median("flops_per_s"), 1e-12),
        "MFU %": _value(point.median("mfu"), 100),
        "speedup": f"{point.speedup:.2f}",
        "efficiency": f"{Interval(math.nan, point.efficiency.mid, math.nan):.2f}",
        "exposed ms": f"{point.exposed_exchange_s.scaled(1e3):z.2f}",
        "payload MB": _value(point.payload_max_bytes, 1e-6),
        title: _value(point.final.get(metric, math.nan), factor),
        "baseline": point.baseline or "-",
        "runs": runs_text(point),
        "emulation": "yes" if point.emulation else "none",
    }


def _value(value: float, scale: float = 1.0) -> str:
    return UNMEASURED if math.isnan(value) else short_text(value * scale, 4)


def _emulated(points: Iterable[Point]) -> str:
    """Say how points were emulated; empty if none was."""
    how = emulation_text(point.emulation or "none" for point in points)
    return f"emulation: {how}" if how else ""


def _advice(points: Iterable[Point]) -> str:
    if not any(0 < point.num_repeats < ENOUGH_REPEATS for point in points):
        return ""
    few = f"Points with fewer than {ENOUGH_REPEATS} repeats (n)"
    return f"{few} have no interval and are not ranked."


def _scalability_lines(points: Sequence[Point]) -> list[str]:
    """Write a table of the serial fraction by ranks, and of the Universal Scalability Law."""
    found = scalability(points)
    if not found:
        return []
    sizes = sorted({size for one in found for size in one.serial_fraction})
    lines = [
        {
            "series": one.series,
            "batch": str(one.batch_size),
            **{f"e({n})": f"{one.serial_fraction.get(n, UNKNOWN):z.2f}" for n in sizes},
            "sigma": f"{one.contention:z.2f}",
            "kappa": f"{one.coherency:z.2f}",
            "best N": f"{one.best_size:.0f}" if math.isfinite(one.best_size) else "-",
        }
        for one in found
    ]
    title = "serial fraction e(N) (Karp-Flatt), and S = N / (1 + sigma (N-1) + kappa N (N-1)):"
    return [title, _fitting(pd.DataFrame(lines), [f"e({size})" for size in sizes])]


def _leader_line(points: list[Point], floor: float) -> str:
    """Name the leaders of one context and world size; only runs that share them compete."""
    competing = {
        point.series for point in points if point.num_repeats and point.strategy != CEILING
    }
    if len(competing) < 2 or not has_ranking(points):
        return ""  # without intervals nothing can be told apart
    one, names = points[0], leaders(points, floor)
    role = "leader" if len(names) == 1 else "leaders, not significantly different"
    model = f" with {one.one.transform}" if one.one.transform else ""
    where = "".join(f" {key}={value}" for key, value in one.one.hosts.items())
    place = f"N={one.world_size} {one.scaling} batch {one.fixed_batch_size}{model}{where}"
    return f"{place}: {role}: {', '.join(names)}"


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
        """The number of ranks beyond which more of them slow down.

        Infinite if there is none, or if the interval of kappa does not exclude that.
        """
        low = self.coherency.mid if math.isnan(self.coherency.lo) else self.coherency.lo
        if low <= 0:
            return math.inf
        return math.sqrt(max(0.0, 1 - self.contention.mid) / self.coherency.mid)


def scalability(points: Iterable[Point]) -> list[Scalability]:
    """Compute the scalability of each series that has runs on several ranks."""
    groups: defaultdict[tuple[object, ...], list[Point]] = defaultdict(list)
    for point in points:
        if point.scaling == "strong" and point.world_size > 1 and point.speedups:
            groups[point.series, point.fixed_batch_size, point.context].append(point)
    return [_scalability(group) for group in groups.values()]


def serial_fraction(speedup: float, size: int) -> float:
    """Return Karp and Flatt's e of a speedup on `size` ranks."""
    return (1 / speedup - 1 / size) / (1 - 1 / size)


def universal_law(speedups: Mapping[int, float]) -> tuple[float, float]:
    """Fit sigma and kappa to speedups by ranks.

    By least squares of N / S - 1 = sigma (N - 1) + kappa N (N - 1), which is linear in both. Noise
    may make them negative: if fits of single repeats stopped at 0, their mean would lie too high,
    and its interval would miss a law without coherency.
    """
    sizes = np.array(list(speedups), dtype=float)
    terms = np.stack([sizes - 1, sizes * (sizes - 1)], axis=1)
    (sigma, kappa), *_ = np.linalg.lstsq(terms, sizes / np.array(list(speedups.values())) - 1)
    return float(sigma), float(kappa)


def _scalability(points: Sequence[Point]) -> Scalability:
    fractions = {
        point.world_size: student(
            np.array([serial_fraction(s, point.world_size) for s in point.speedups.values()])
        )
        for point in points
    }
    shared = set.intersection(*(set(point.speedups) for point in points))
    fits = [universal_law({p.world_size: p.speedups[k] for p in points}) for k in sorted(shared)]
    contention = coherency = UNKNOWN
    if len(points) > 1 and fits:
        contention, coherency = (student(np.array(values)) for values in zip(*fits, strict=True))
    return Scalability(
        points[0].series, points[0].fixed_batch_size, fractions, contention, coherency
    )
