"""Draw pages and figures of docs/results anew, from the records and results that lie there.

    python -m tests.support.results          (make results)

`records/NAME.tar.xz` has the runs of a study, without the times of single steps: its page is made
from them, and its learning curves if they kept losses. A figure beside a result of lab.bench, or
beside a map of strategies, is drawn from it.
"""

from __future__ import annotations

import json
import math
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.advice.score import LeadAnswer, Map, map_chart
from lab.analysis.places import Lead, MapPlace, Place
from lab.analysis.results import load
from lab.benchmarks.present import chart_of, is_result
from lab.measure.statistics import Interval
from lab.record.steps import STEPS
from lab.web.page import parts_of, render, write

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"


def draw_studies(results: Path) -> list[Path]:
    """Write the page of each study, and its learning curves where there are some already."""
    drawn = list[Path]()
    with TemporaryDirectory() as here:
        runs = Path(here) / "runs"  # the default: commands on pages need not name it
        for packed in sorted(results.glob("records/*.tar.xz")):
            with tarfile.open(packed) as tar:
                tar.extractall(runs, filter="data")
            name = packed.name.removesuffix(".tar.xz")
            folder, page = runs / name, results / f"pages/{name}.html"
            command = f"python -m lab.report runs/{name} out={name}.html"
            write(render(parts_of([folder], command)), page)
            drawn.append(page)
            curves = results / name / "convergence"
            if curves.with_suffix(".png").exists() and any(folder.glob(f"*/{STEPS}")):
                study = load(folder)
                chart = replace(study.chart("convergence"), notes=study.notes("strong"))
                drawn += chart.write(curves, ["png"])
    return drawn


def draw_benchmarks(results: Path) -> list[Path]:
    """Draw each figure that lies beside a result of lab.bench."""
    drawn = list[Path]()
    for path in sorted(results.rglob("*.json")):
        result = json.loads(path.read_text())
        if path.with_suffix(".png").exists() and is_result(result) and (chart := chart_of(result)):
            drawn += chart.write(path.with_suffix(""), ["png"])
    return drawn


def draw_maps(results: Path) -> list[Path]:
    """Draw each map of strategies from the places that lab.score wrote."""
    drawn = list[Path]()
    for path in sorted(results.glob("*_map.json")):
        answers = tuple(map(_answer, json.loads(path.read_text())["places"]))
        drawn += map_chart(Map(answers, math.nan, {})).write(path.with_suffix(""), ["png"])
    return drawn


def _answer(place: Mapping[str, Any]) -> LeadAnswer:
    where = MapPlace(*(place[key] for key in ("model", "links", "world_size", "batch_size")))
    leads = (place[key] for key in ("measured", "predicted"))
    return LeadAnswer(Place(where, place["steps_s"]), *(_lead(**lead) for lead in leads))


def _lead(name: str, others: list[str], factor: Mapping[str, float | None]) -> Lead:
    ends = (factor[key] for key in ("lo", "mid", "hi"))
    return Lead(name, tuple(others), Interval(*(math.nan if e is None else e for e in ends)))


if __name__ == "__main__":
    for each in (*draw_studies(RESULTS), *draw_maps(RESULTS), *draw_benchmarks(RESULTS)):
        print(f"wrote {each.relative_to(RESULTS)}, {each.stat().st_size:,} bytes")
