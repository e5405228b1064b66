"""The table of a study shows the task's own metric."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.analysis import summary
from lab.analysis.points import table
from lab.analysis.records import load_study
from tests.support.records import leave, make_record


@pytest.mark.parametrize(
    ("final", "heading", "value"),
    [
        ({"loss": 0.5, "accuracy": 0.9694}, "accuracy %", "96.94"),
        ({"loss": 0.25, "mae": 0.125}, "mae", "0.125"),
        ({"loss": 3.5}, "loss", "3.5"),
    ],
)
def test_a_metric_has_a_column(
    tmp_path: Path, final: dict[str, float], heading: str, value: str
) -> None:
    leave(tmp_path / "one", make_record("none", 1, 0.5, final=final))
    leave(tmp_path / "two", make_record("none", 2, 0.25, final={**final, "loss": 3.5}))
    study = load_study(tmp_path)
    rows = table(study)
    assert [row.final.keys() for row in rows] == [final.keys()] * 2
    text = summary.text(rows, study)
    assert heading in text and value in text
    summary.write_csv(rows, tmp_path / "summary.csv")
    assert set(final) <= set((tmp_path / "summary.csv").read_text().splitlines()[0].split(","))
