"""Tasks through `lab.train`: unfit targets are refused at once, and regression learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.record.schema import Record
from lab.training import outcome
from tests.conftest import Finished
from tests.support.ranks import train

MISFITS = "tests.support.misfits"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ("data=rotated_digits",),
            "task=classification: targets are float32 [1437]; they must be class indices, int64 "
            "[samples], of data that says how many classes it has",
        ),
        (
            ("task=regression",),
            "task=regression: targets are int64 [1437], indices of 10 classes; they must be "
            "numbers, float32 [samples] or [samples, k]",
        ),
        (
            (f"data._target_={MISFITS}.a_class_too_many",),
            "task=classification: targets are int64 [8] from 0 to 10; class indices must be from "
            "0 to 9",
        ),
        (
            (f"data._target_={MISFITS}.a_word_for_each_pixel",),
            "task=classification: targets are int64 [64, 256]; they must be class indices, int64 "
            "[samples], of data that says how many classes it has",
        ),
        (
            (f"model._target_={MISFITS}.one_output_too_many",),
            "task=classification: the model's outputs are float32 [1, 11]; with these targets "
            "they must be floating-point [batch, 10]",
        ),
    ],
)
def test_misfits_are_refused_before_the_first_step(
    command: Callable[..., Finished], tmp_path: Path, settings: tuple[str, ...], line: str
) -> None:
    done = command("lab.train", "device=cpu", *settings)
    assert done.error_lines == [f"lab.train: error: {line}"]
    assert done.code == 2 and "Traceback" not in done.err
    assert not list(tmp_path.rglob("record.json"))


def test_a_regression_learns_and_its_record_holds_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("task=regression", "data=rotated_digits", "data.size=16", "optim.lr=0.02")
    record = train(2, *settings, "steps=60", "eval_every=30")[0].record
    assert set(record["final"]) == {"loss", "mae"}
    first, last = record["evaluations"]
    assert record["final"] == {name: last[name] for name in ("loss", "mae")}
    # Angles are uniform within 45 degrees: a constant 0 has a mae of 0.39 radians.
    assert last["mae"] < 0.25 and last["loss"] < first["loss"]
    shown = outcome.summary(Record.from_json(record), tmp_path)
    assert f"test mae        {last['mae']:.4g}" in shown
