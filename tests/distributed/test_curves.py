"""The curves of a run hold every step, once, and equal what the run directory says afterwards."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from lab.record.recorders import CURVES
from lab.record.steps import STEPS
from tests.support.ranks import train

RUN = ("data.size=16", "batch_size=24", "recorder=csv", "eval_every=4")
LR = ("optim.lr=0.08", "optim.warmup_steps=4", "optim.schedule=constant")


def test_curves_equal_the_steps_and_evaluations_of_the_record(tmp_path: Path) -> None:
    settings = (*RUN, f"runs_dir={tmp_path}", "cell=a", "steps=8", "measure=breakdown", *LR)
    first, second = train(2, *settings, "strategy=onebit")
    assert (first.code, second.code) == (0, 0)
    curves = pd.read_csv(tmp_path / "default/a" / CURVES)
    steps = pd.read_parquet(tmp_path / "default/a" / STEPS).query("rank == 0")
    assert curves["step"].tolist() == list(range(1, 9))
    assert steps["step"].tolist() == list(range(8))
    for name, column in (
        *(("train/loss", "loss"), ("train/step_s", "step_s")),
        ("train/exposed_exchange_s", "exchange_s"),
    ):
        assert curves[name].tolist() == pytest.approx(steps[column].tolist()), name
    rates = zip(curves["train/samples_per_s"], curves["train/step_s"], strict=True)
    assert all(0 < rate <= 24.001 / step_s for rate, step_s in rates)
    assert curves["train/lr"].tolist() == pytest.approx([0.02, 0.04, 0.06, *[0.08] * 5])
    assert min(curves["train/payload_bytes"].tolist()[1:]) > 0
    for name in ("loss", "accuracy", "seconds"):
        evaluations = {e["step"]: e[name] for e in first.record["evaluations"]}
        found = curves[["step", f"test/{name}"]].dropna().set_index("step")[f"test/{name}"]
        assert found.to_dict() == pytest.approx(evaluations)


def test_a_run_without_a_recorder_leaves_no_curves(tmp_path: Path) -> None:
    train(1, *RUN, f"runs_dir={tmp_path}", "cell=a", "steps=2", "recorder=local")
    assert not list((tmp_path / "default/a").glob("*.csv"))
