"""The progress bar shows the throughput in samples and predictions."""

from __future__ import annotations

import pytest

from lab.record.schema import Compute
from lab.training.progress import ProgressBar
from tests.support.records import make_record


def test_rates_stand_before_the_metrics() -> None:
    tokens = {"unit": "sequence", "prediction": "token", "predictions_per_sample": 100}
    with ProgressBar(
        make_record("none", 1, 0.5, batch_size=8, **tokens), 20, 10, shown=True
    ) as bar:
        assert "sequences/s" not in str(bar)  # no step was made
        bar.set_postfix({"loss": "2.5"}, refresh=False)
        bar.n += 5
        bar.start_t -= 10  # as if they had taken 10 s
        shown = str(bar)
    assert shown.startswith("none-n1:  75%") and "15/20" in shown
    assert shown.endswith("4 sequences/s, 400 tokens/s, loss=2.5]")


def test_operations_per_second_and_mfu_stand_behind_the_rates() -> None:
    counted = Compute(2e9, None, 1e12, "estimated: a core")
    with ProgressBar(
        make_record("none", 1, 0.5, batch_size=8, compute=counted), 20, 0, shown=True
    ) as bar:
        bar.n += 5
        bar.start_t -= 10  # as if they had taken 10 s
        assert "4 images/s, 0.008 TFLOP/s, MFU 0.8%" in str(bar)


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(make_record("none", 2, 0.5), 20, 0, shown=False) as bar:
        bar.update(20)
    assert capsys.readouterr().err == ""
