"""Draw pages and figures of docs/results anew, from the records and results that lie there.

    python -m tests.support.results          (make results)

`records/NAME.tar.xz` has the runs of a study, without the times of single steps: its page is made
from them, and its learning curves if they kept losses. A figure beside a result of lab.bench is
drawn from it.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lab.analysis.results import load
from lab.benchmarks.present import chart_of, is_result
from lab.record.steps import STEPS
from lab.web.page import parts_of, render, write

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"


def draw_studies(results: Path) -> list[Path]:
    """Write the page of each study, and its learning curves where there are some already."""
    drawn = list[Path]()
    with TemporaryDirectory() as runs:
        for packed in sorted(results.glob("records/*.tar.xz")):
            with tarfile.open(packed) as tar:
                tar.extractall(runs, filter="data")
            name = packed.name.removesuffix(".tar.xz")
            folder, page = Path(runs) / name, results / f"pages/{name}.html"
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


if __name__ == "__main__":
    for each in (*draw_studies(RESULTS), *draw_benchmarks(RESULTS)):
        print(f"wrote {each.relative_to(RESULTS)}, {each.stat().st_size:,} bytes")
