"""The noise floor: differences between copies of one computation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lab.analysis import summary
from lab.analysis.points import leaders, noise_floor, points_of, table
from lab.analysis.records import RecordedStudy, load_study
from tests.support.records import leave, make_record

EXACT = {"none": "NoExchange", "tree": "Tree", "ring": "Ring", "allreduce": "AllReduce"}


def leave_run(folder: Path, strategy: str, size: int, seconds: float, repeat: int = 0) -> None:
    exchange = EXACT.get(strategy, "OneBit")
    sync = "NoSync" if strategy == "none" else "GradSync"
    settings = {"exchange._target_": f"lab.exchange.{exchange}", "sync._target_": f"lab.{sync}"}
    record = make_record(strategy, size, seconds, repeat=repeat, settings=settings)
    leave(folder / f"{strategy}-{size}-{repeat}", record)


def study_of(folder: Path, copies: dict[str, float], onebit: float, tree: float) -> RecordedStudy:
    """A study with a run of each copy on one rank, and three of two strategies on two ranks."""
    for strategy, seconds in copies.items():
        leave_run(folder, strategy, 1, seconds)
    for repeat, drift in enumerate((0.999, 1.0, 1.001)):
        leave_run(folder, "onebit", 2, onebit * drift, repeat)
        leave_run(folder, "tree", 2, tree * drift, repeat)
    return load_study(folder)


COPIES = {"none": 1.0, "tree": math.e**0.01, "ring": math.e**-0.01, "allreduce": 1.0}


def test_by_hand(tmp_path: Path) -> None:
    study = study_of(tmp_path, {**COPIES, "onebit": 9.0}, 0.5, 0.5)
    # Variance 2e-4 / 3 of four logarithms; 3.182446 is the quantile of 3 degrees of freedom.
    expected = math.expm1(3.182446 * math.sqrt(2 * 2e-4 / 3))
    assert noise_floor(points_of(study.cells)) == pytest.approx(expected)


def test_too_few_copies_give_no_floor(tmp_path: Path) -> None:
    study = study_of(tmp_path, {"none": 1.0, "tree": 1.1, "onebit": 9.0}, 0.5, 0.5)
    assert math.isnan(noise_floor(points_of(study.cells)))


@pytest.mark.parametrize(("tree", "expected"), [(0.515, ["tree", "onebit"]), (0.56, ["onebit"])])
def test_differences_below_the_floor_rank_nothing(
    tmp_path: Path, tree: float, expected: list[str]
) -> None:
    study = study_of(tmp_path, COPIES, 0.5, tree)
    rows, floor = table(study), noise_floor(points_of(study.cells))
    assert 0.02 < floor < 0.06
    pair = [row for row in rows if row.world_size == 2]
    assert leaders(pair, math.nan) == ["onebit"]  # by their intervals alone
    assert sorted(leaders(pair, floor)) == sorted(expected)
    text = summary.text(rows, study, floor)
    assert "noise floor 3.7 %: repeated one-rank runs" in text
    assert ("not significantly different" in text) == (len(expected) > 1)
