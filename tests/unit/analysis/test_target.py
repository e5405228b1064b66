"""Time to accuracy: when runs reached a target, and what is said of those that did not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab import plot
from lab.analysis.points import points_of
from lab.analysis.records import load_study
from lab.analysis.summary import target_table
from tests.support.commands import said
from tests.support.records import leave, make_record

CURVES = {
    0: [(10, 1.0, 0.5), (20, 2.0, 0.8), (30, 3.0, 0.95)],
    1: [(10, 1.1, 0.6), (20, 2.2, 0.91), (30, 3.3, 0.94)],
    2: [(10, 0.9, 0.4), (20, 1.8, 0.7), (30, 2.7, 0.92)],
}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for repeat, curve in CURVES.items():
        record = make_record("tree", 2, 0.1, repeat=repeat)
        record.evaluations = [
            {"step": step, "seconds": seconds, "loss": 1 - accuracy, "accuracy": accuracy}
            for step, seconds, accuracy in curve
        ]
        leave(tmp_path / "study" / f"tree-n2-r{repeat}", record)
    return tmp_path / "study"


def test_the_first_evaluation_at_the_target_counts(study: Path) -> None:
    lines = target_table(points_of(load_study(study).cells), 0.9).splitlines()
    assert lines[0] == "time to accuracy 90.00 %:"
    mean = (3.0 * 2.2 * 2.7) ** (1 / 3)
    assert re.fullmatch(rf" +tree 2 +64 {mean:.2f} \[[\d., ]+\] +30 +3 of 3", lines[2])


def test_a_run_that_never_gets_there_leaves_neither_mean_nor_steps(study: Path) -> None:
    (*_, line) = target_table(points_of(load_study(study).cells), 0.945).splitlines()
    assert re.fullmatch(r" +tree 2 +64 +- +- +1 of 3", line)


def test_the_table_is_printed(study: Path, tmp_path: Path) -> None:
    text = said(plot.main, str(study), "target=0.9", f"out={tmp_path}/figures", "only=map")
    assert "time to accuracy 90.00 %:" in text and "3 of 3" in text
