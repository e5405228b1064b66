"""Runs whose samples have several predictions: tokens per second beside sequences per second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.analysis import summary
from lab.analysis.points import Point, table
from lab.analysis.records import RecordedStudy, load_study
from lab.analysis.results import Results
from lab.analysis.runs import _few_ticks
from lab.analysis.summary import prediction_of
from lab.draw.chart import drawn
from tests.support.records import leave, make_record
from tests.support.svg import outside, overlapping

TOKENS: dict[str, Any] = {"unit": "sequence", "prediction": "token", "predictions_per_sample": 128}


def study_of(folder: Path, **more: Any) -> tuple[RecordedStudy, list[Point]]:
    """Leave runs of 64 sequences in half a second, on one rank and on two."""
    for ranks in (1, 2):
        evaluations = [
            {"step": step, "seconds": float(step), "loss": 1.0, "perplexity": perplexity}
            for step, perplexity in ((1, 220.0), (2, 12.0))
        ]
        record = make_record("allreduce", ranks, 0.5, evaluations=evaluations, **more)
        leave(folder / f"{ranks}", record)
    study = load_study(folder)
    return study, table(study)


def test_the_table_and_the_csv_have_both(tmp_path: Path) -> None:
    study, rows = study_of(tmp_path, **TOKENS)
    text = summary.text(rows, study)
    assert "sequences/s 128, tokens/s 16384" in text  # alike in both runs
    summary.write_csv(rows, tmp_path / "summary.csv")
    head, first, _ = (line.split(",") for line in (tmp_path / "summary.csv").read_text().split())
    row = dict(zip(head, first, strict=True))
    assert (row["prediction"], row["predictions_per_sample"]) == ("token", "128")


def test_images_have_one_rate(tmp_path: Path) -> None:
    study, points = study_of(tmp_path)
    assert "predictions/s" not in summary.text(points, study)
    assert Results(study).chart("throughput").message == (
        "With allreduce, 2 ranks train 128 images per second"
    )


def test_the_chart_tells_both_rates(tmp_path: Path) -> None:
    chart = Results(study_of(tmp_path, **TOKENS)[0]).chart("throughput")
    assert chart.message == "With allreduce, 2 ranks train 128 sequences (16,384 tokens) per second"
    assert "A sequence has 128 tokens." in chart.about


def test_rates_of_different_predictions_share_no_axis(tmp_path: Path) -> None:
    _, tokens = study_of(tmp_path / "a", **TOKENS)
    _, images = study_of(tmp_path / "b")
    assert prediction_of(tokens) == ("token", 128)
    assert prediction_of([*tokens, *images]) == ("prediction", 1)


def test_perplexity_is_drawn_on_a_logarithmic_axis(tmp_path: Path) -> None:
    chart = Results(study_of(tmp_path, **TOKENS)[0]).chart("convergence")
    assert chart.message == "Perplexity ends at 12"
    svg = drawn(chart.spec(), "svg").decode()
    assert overlapping(svg) == outside(svg) == []
    places = [svg.index(f">{each}</text>") for each in (20, 50, 100, 200)]  # on one axis
    assert places == sorted(places)


@pytest.mark.parametrize("ends", [(4.2, 16.0), (2.1, 2.9), (3.0, 800.0)])
def test_a_logarithmic_axis_has_numbers_however_short_it_is(ends: tuple[float, float]) -> None:
    assert sum(ends[0] <= tick <= ends[1] for tick in _few_ticks(*ends)) >= 3
