"""MB is 10**6 bytes and MiB 2**20, wherever the lab prints or draws a number of bytes."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from lab.analysis import summary
from lab.analysis.points import table
from lab.analysis.records import Study, load_study
from lab.analysis.results import Results
from lab.benchmarks import catalogue, codec, collective, present
from lab.device import convolution, footprint, transfer
from lab.device.footprint import KINDS
from lab.diagnosis import view as diagnosis
from lab.diagnosis.evidence import gather
from lab.diagnosis.rules import judge, remedies
from lab.record.schema import read_record
from lab.settings.config import load
from lab.simulate import view as prediction
from lab.study import dry_run
from lab.sync.pattern import gradsync, idle
from lab.training import progress
from lab.web.tables import points_table
from tests.conftest import ROOT
from tests.support.records import leave, make_record

NUM_BYTES = 10**8  # 95.4 MiB
# Say how much something is, which nothing computes.
FIXED = {"lab/benchmarks/catalogue.py"}

IN_ONE_BUCKET: dict[str, Any] = {
    **{"strategy": "overlap", "world_size": 2, "num_steps": 9},
    **{"bucket_mb": 25.0, "accumulate": 1},
}


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Two ranks whose root sends twice what a ring would; and `none`, which shows what it costs."""
    sent: dict[str, Any] = {
        "payload_bytes_per_step": [2 * NUM_BYTES, NUM_BYTES],
        "messages_per_step": [4.0, 2.0],
        "gradient_bytes": NUM_BYTES,
        "num_parameters": NUM_BYTES // 4,
    }
    for strategy, num_ranks, step_s in (("none", 1, 0.4), ("none", 2, 0.2), ("star", 2, 0.7)):
        folder = tmp_path / f"{strategy}-{num_ranks}"
        leave(folder, make_record(strategy, num_ranks, step_s, **sent))
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(load([f"strategy={strategy}"])))
    return load_study(tmp_path)


def written_by(study: Study) -> dict[str, tuple[str, str]]:
    """By file: a text that it makes of NUM_BYTES or twice as many, and how they stand in it."""
    (cell,) = (cell for cell in study.cells if cell.strategy == "star")
    (row,) = (row for row in table(study) if row.series == "star")
    record, evidence = read_record(cell.folder / "record.json"), gather(study, cell)
    used = dict.fromkeys(("total_bytes", "theory_bytes", "extra_bytes"), NUM_BYTES)
    peaks = {"peak_bytes": [{"mad": NUM_BYTES}], "extra_theory_bytes": [NUM_BYTES]}
    peaks |= {"optimizer_bytes": [NUM_BYTES], "optimizer_share": 0.25}
    kinds = {"name": "a", "num_parameters": 0, "largest_batch": None, "total_bytes": NUM_BYTES}
    kinds |= {"measured_bytes": None, "bytes": dict.fromkeys(KINDS, NUM_BYTES)}
    copies = {"direction": "HtoD", "kind": "a", "invocations": 1, "num_bytes": NUM_BYTES}
    copies |= {"seconds": 1.0, "hidden_s": 0.0, "sizes": [1]}
    layer = {**dict.fromkeys(("layer", "pass", "algorithm", "refused", "implementation"), "")}
    layer |= {**dict.fromkeys(("count", "operations", "executed", "error"), 0), "ratio": None}
    layer |= {"time_s": {"median": 0.0, "mad": 0.0}, "workspace_bytes": NUM_BYTES}
    spot = {"layer": "a", "way": "", "bound": "", "flops": 0, "flops_per_byte": None}
    spot |= {
        "seconds": 1.0,
        "of_roof": None,
        **dict.fromkeys(("num_bytes", "loose_bytes"), NUM_BYTES),
    }
    profile = {"profiles": {"p": NUM_BYTES}, "fit": None, "scores": []}
    profile |= {"sources": {"p": "measured"}, "by_default": False, "measured": None}
    profile |= {"hardware": [{"name": "h", "conditions": "", "assumed": []}]}
    rows = {"rows": [{"scaling": "strong", "evidence": "", "conditions": "", "basis": "profile"}]}
    points = points_table([row], "a")
    tabled = zip(points.header, points.rows[0], strict=True)
    return {
        "lab/web/tables.py": (
            " ".join(f"{name} {cell.text}" for name, cell in tabled),
            "payload MB 200.0",
        ),
        "lab/analysis/summary.py": (summary.text([row], study), "payload MB 200,"),
        "lab/analysis/charts.py": (
            json.dumps(Results(study).chart("payload").spec()),
            '"value": 200.0',
        ),
        "lab/analysis/results.py": (Results(study)._repr_html_(), "<td>200</td>"),
        "lab/benchmarks/catalogue.py": (catalogue.size_name(NUM_BYTES), "100 MB"),
        "lab/device/convolution.py": (" ".join(convolution._line(layer)), " 100.0 "),
        "lab/device/footprint.py": (
            " ".join(footprint.table({"rows": [kinds, kinds], "memory_gb": None})[1]),
            f"a 0.000 {' '.join(['100.0'] * (len(KINDS) + 1))}",
        ),
        "lab/device/roofline.py": (
            " ".join(present.table_of({"bench": "roofline", "rows": [spot]})[1]),
            "a  0.000 100.00 ",
        ),
        "lab/device/transfer.py": (
            " ".join(transfer._line(copies)),
            "HtoD a 1 100.000 100000.00 0.100 1000.000",
        ),
        "lab/benchmarks/present.py": (
            " ".join(present.in_cache({"cache_bytes": NUM_BYTES}, 0)),
            "up to 100 MB stay",
        ),
        "lab/benchmarks/memory.py": (
            " ".join(
                present.table_of(
                    {
                        "bench": "memory",
                        "rows": [{"name": "a", "of_theory": 1.0, "rank": 0, **used, **peaks}],
                    }
                )[1]
            ),
            "a 100.0 100.0 100.0 1.000 100.0 100.0 0 100.00 0.2500",
        ),
        "lab/diagnosis/view.py": (
            diagnosis.full(evidence, judge(evidence), []),
            "200 MB in 4 messages by the busiest rank: 400 MB/s of",
        ),
        "lab/diagnosis/rules.py": (
            " ".join(remedy.why for remedy in remedies(evidence, judge(evidence))),
            "no rank would send more than 100 MB",
        ),
        "lab/simulate/view.py": (prediction.notes({**rows, **profile})[0], "(100.0 MB of"),
        "lab/study/dry_run.py": (dry_run.needs(60, NUM_BYTES), "about 1 min, 100 MB"),
        "lab/sync/pattern.py": (
            idle(gradsync(True), **IN_ONE_BUCKET, bucket_bytes=[NUM_BYTES])[0],
            "all 100 MB of gradients",
        ),
        "lab/training/progress.py": (progress.summary(record, cell.folder), "200.000 MB per"),
    }


def test_mb_is_a_million_bytes_in_every_file_that_writes_it(study: Study) -> None:
    written = written_by(study)
    assert {path for path in python_files() if writes_mb(ROOT / path)} == {*written, *FIXED}
    wrong = {path: whole for path, (whole, expected) in written.items() if expected not in whole}
    assert wrong == {}


def python_files() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in (ROOT / "lab").rglob("*.py")]


def writes_mb(path: Path) -> bool:
    """Whether a string of the file at `path`, but for its docstrings, has MB in it."""
    tree = ast.parse(path.read_text())
    alone = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return any(isinstance(s.value, str) and "MB" in s.value for s in strings if s not in alone)


def test_rates_are_in_billions_of_bytes() -> None:
    times = {"allreduce": np.full(3, 0.5)}
    row = collective._row("allreduce", NUM_BYTES, times, 0, 2, None)
    assert row["algbw_gb_per_s"] == row["busbw_gb_per_s"] == pytest.approx(0.2)
    assert codec._rate([0.5], NUM_BYTES)["gb_per_s"] == pytest.approx(0.2)
