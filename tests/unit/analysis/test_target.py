"""Time to accuracy: when runs reached a target, and what is said of those that did not."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import plot
from lab.analysis.points import points_of
from lab.analysis.records import load_study
from lab.analysis.summary import times_to_target
from tests.support.commands import refusal, said
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
    (found,) = times_to_target(points_of(load_study(study).cells), 0.9)
    assert (found.metric, found.num_reached, found.num_runs, found.steps) == ("accuracy", 3, 3, 30)
    assert found.seconds.mid == pytest.approx((3.0 * 2.2 * 2.7) ** (1 / 3))
    assert found.seconds.lo < found.seconds.mid < found.seconds.hi


def test_a_run_that_never_gets_there_leaves_no_mean(study: Path) -> None:
    (found,) = times_to_target(points_of(load_study(study).cells), 0.945)
    assert (found.num_reached, found.num_runs) == (1, 3)
    assert found.seconds.mid != found.seconds.mid


def test_the_table_is_printed(study: Path, tmp_path: Path) -> None:
    text = said(plot.main, str(study), "target=0.9", f"out={tmp_path}/figures", "only=map")
    assert "time to accuracy 90.00 %:" in text and "3 of 3" in text


def test_a_folder_or_a_width_that_cannot_be_is_refused(study: Path) -> None:
    line = refusal(plot.main, str(study), f"out={__file__}")
    assert line.startswith("out=") and line.endswith(": cannot make this folder: File exists")
    assert refusal(plot.main, str(study), "width_in=1e308").startswith("width_in=1e308: must be")
