"""Runs whose samples have several predictions: tokens per second beside sequences per second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from lab.analysis import summary
from lab.analysis.figures.convergence import convergence, make_logarithmic
from lab.analysis.figures.speedup import throughput
from lab.analysis.records import Study, load_study
from lab.analysis.sheet import Sheet
from lab.analysis.speedup import Row, prediction_of, table
from lab.draw.looks import looks_of
from tests.support.figures import ticks
from tests.support.records import leave, make_record

TOKENS: dict[str, Any] = {"unit": "sequence", "prediction": "token", "predictions_per_sample": 128}


def study_of(folder: Path, **more: Any) -> tuple[Study, list[Row]]:
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


def sheet(study: Study, rows: list[Row]) -> Sheet:
    return Sheet(study, "strong", tuple(rows), looks_of(["allreduce"]))


def test_the_table_and_the_csv_have_both(tmp_path: Path) -> None:
    study, rows = study_of(tmp_path, **TOKENS)
    text = summary.text(rows, study)
    assert "sequences/s 128, tokens/s 1.638e+04" in text  # alike in both runs
    summary.write_csv(rows, tmp_path / "summary.csv")
    head, first, _ = (line.split(",") for line in (tmp_path / "summary.csv").read_text().split())
    row = dict(zip(head, first, strict=True))
    assert (row["prediction"], row["predictions_per_sample"]) == ("token", "128")


def test_images_have_one_rate(tmp_path: Path) -> None:
    study, rows = study_of(tmp_path)
    assert "predictions/s" not in summary.text(rows, study)
    (panel,) = throughput(sheet(study, rows)).axes
    assert panel.child_axes == []


def test_the_figure_has_a_second_axis(tmp_path: Path) -> None:
    figure = throughput(sheet(*study_of(tmp_path, **TOKENS)))
    (panel,) = figure.axes
    (right,) = panel.child_axes
    assert (panel.get_ylabel(), right.get_ylabel()) == ("sequences/s, all ranks", "tokens/s")
    figure.savefig(tmp_path / "a.svg")
    assert right.get_ylim() == pytest.approx([128 * end for end in panel.get_ylim()])


def test_rates_of_different_predictions_share_no_axis(tmp_path: Path) -> None:
    _, tokens = study_of(tmp_path / "a", **TOKENS)
    _, images = study_of(tmp_path / "b")
    assert prediction_of(tokens) == ("token", 128)
    assert prediction_of([*tokens, *images]) == ("prediction", 1)


def test_perplexity_is_drawn_on_a_logarithmic_axis(tmp_path: Path) -> None:
    panel, _ = convergence(sheet(*study_of(tmp_path, **TOKENS))).axes
    assert (panel.get_ylabel(), panel.get_yscale()) == ("test perplexity", "log")
    assert {"20", "50", "100", "200"} <= set(ticks(panel, "y"))


@pytest.mark.parametrize("ends", [(4.2, 16.0), (2.1, 2.9), (3.0, 800.0)])
def test_a_logarithmic_axis_has_numbers_however_short_it_is(ends: tuple[float, float]) -> None:
    panel = Figure().add_subplot()
    panel.plot(ends)
    make_logarithmic(panel)
    low, high = panel.get_ylim()
    assert sum(low <= tick <= high for tick in panel.get_yticks()) >= 3
