"""A run of one rank counts for all strategies that compute the same there, and for no others."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from lab.analysis import summary
from lab.analysis.charts import _from_one_rank
from lab.analysis.points import Point, table
from lab.analysis.records import load_study
from lab.analysis.results import Results
from lab.analysis.summary import shared_runs
from lab.diagnosis.evidence import gather
from lab.study.grid import Cell, read
from tests.support.records import leave, make_record

SAME = "because they compute the same"


def measured(folder: Path, seconds: dict[str, float], *grid: str, **more: Any) -> list[Point]:
    """Leave a record of each cell of a grid; its step takes the seconds of `<strategy>-<ranks>`."""
    for cell in read(["study=mine", "world_size=1,2", *grid]).cells:
        leave(
            folder / cell.name, record_of(cell, seconds[f"{cell.strategy}-{cell.world_size}"], more)
        )
    return table(load_study(folder))


def record_of(cell: Cell, seconds: float, more: dict[str, Any]) -> Any:
    about = {"repeat": cell.repeat, "variant": cell.variant, "settings": cell.settings}
    about["transform"] = "fc1x1" if cell.strategy == "fc1x1" else None
    config = cell.config
    size = config.batch_size
    return make_record(
        cell.strategy,
        cell.world_size,
        seconds,
        batch_size=size,
        scaling=config.scaling,
        **about | more,
    )


def one(rows: list[Point], series: str, ranks: int = 2) -> Point:
    return next(row for row in rows if (row.series, row.world_size) == (series, ranks))


def test_without_none_a_strategy_takes_the_run_of_one_that_computes_the_same(
    tmp_path: Path,
) -> None:
    seconds = {"tree-1": 4.0, "tree-2": 3.2, "overlap-2": 2.0, "onebit-1": 6.0, "onebit-2": 5.0}
    rows = measured(tmp_path, seconds, "strategy=tree,overlap,onebit")
    assert len(rows) == 5
    overlap = one(rows, "overlap")
    assert (overlap.speedup.mid, overlap.baseline, overlap.one_rank) == (2.0, "tree", "tree")
    assert (one(rows, "tree").speedup.mid, one(rows, "tree").one_rank) == (1.25, "tree")
    assert (one(rows, "onebit").speedup.mid, one(rows, "onebit").one_rank) == (1.2, "onebit")
    assert shared_runs(rows) == f"the N=1 run of tree is shared by overlap, {SAME}"


def test_over_none_buckets_of_any_size_have_one_run_of_one_rank(tmp_path: Path) -> None:
    seconds = {"none-1": 4.0, "none-2": 2.0, "overlap-2": 3.2, "onebit-1": 8.0, "onebit-2": 5.0}
    rows = measured(tmp_path, seconds, "strategy=none,overlap,onebit", "bucket_mb=1,4")
    assert [row.series for row in rows if row.world_size == 1].count("none bucket_mb=1.0") == 1
    for size in ("1.0", "4.0"):
        assert one(rows, f"overlap bucket_mb={size}").speedup.mid == 1.25
        assert one(rows, f"onebit bucket_mb={size}").speedup.mid == pytest.approx(0.8)
    assert shared_runs(rows).startswith(
        "the N=1 run of none bucket_mb=1.0 is shared by none bucket_mb=4.0, "
    )


def test_what_differs_on_one_rank_is_never_shared(tmp_path: Path) -> None:
    seconds = {"tree-1": 4.0, "tree-2": 2.0}
    measured(tmp_path, seconds, "strategy=tree")
    for strategy, changed in (("onebit", ""), ("ring", "model=mlp"), ("ring", "batch_size=8")):
        for cell in read(
            ["study=mine", f"strategy={strategy}", "world_size=2", *changed.split()]
        ).cells:
            leave(tmp_path / cell.name, record_of(cell, 1.0, {}))
    leave(tmp_path / "fc1x1", make_record("fc1x1", 2, 1.0, batch_size=128, transform="fc1x1"))
    leave(tmp_path / "old", make_record("ring", 2, 1.0, batch_size=128))  # knows no settings
    rows = table(load_study(tmp_path))
    others = [row for row in rows if row.strategy != "tree"]
    assert len(others) == 5
    assert all(math.isnan(row.speedup.mid) and row.one_rank == "" for row in others)


def test_another_machine_shares_nothing(tmp_path: Path) -> None:
    seconds = {"tree-1": 4.0, "tree-2": 2.0, "ring-2": 1.0}
    rows = measured(tmp_path, seconds, "strategy=tree,ring", environment={"cpu": "A"})
    assert one(rows, "ring").speedup.mid == 4.0
    for cell in read(["study=mine", "strategy=star", "world_size=2"]).cells:
        leave(tmp_path / cell.name, record_of(cell, 1.0, {"environment": {"cpu": "B"}}))
    assert math.isnan(one(table(load_study(tmp_path)), "star machine=B").speedup.mid)


def test_a_study_with_all_baselines_uses_and_names_its_own(tmp_path: Path) -> None:
    seconds = {"tree-1": 4.0, "tree-2": 2.0, "ring-1": 3.0, "ring-2": 2.0}
    rows = measured(tmp_path, seconds, "strategy=tree,ring", "baselines=all")
    assert one(rows, "ring").speedup.mid == pytest.approx(1.5)
    assert shared_runs(rows) == ""


def test_tables_figures_and_explanations_use_it_and_say_so(tmp_path: Path) -> None:
    seconds = {"tree-1": 4.0, "tree-2": 2.5, "overlap-2": 2.0}
    rows = measured(tmp_path, seconds, "strategy=tree,overlap")
    study, note = load_study(tmp_path), f"the N=1 run of tree is shared by overlap, {SAME}"
    assert note in summary.text(rows, study)
    summary.write_csv(rows, tmp_path / "summary.csv")
    with (tmp_path / "summary.csv").open() as file:
        assert {row["series"]: row["one_rank"] for row in csv.DictReader(file)} == {
            "tree": "tree",
            "overlap": "tree",
        }
    results = Results(study)
    data: Any = _from_one_rank(results.summary())
    assert sorted(zip(data["series"], data["world_size"], strict=True)) == [
        *(("overlap", 1), ("overlap", 2), ("tree", 1), ("tree", 2))
    ]
    assert note in results.notes("strong")
    overlap = next(cell for cell in study.cells if cell.strategy == "overlap")
    assert gather(results, overlap).one_s == pytest.approx(4.0)
