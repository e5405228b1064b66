"""Tasks through `lab.train`: unfit targets are refused at once, the others learn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lab.record.schema import Record
from lab.training import recording
from tests.conftest import ROOT
from tests.support.ranks import told, train

MISFITS = "tests.e2e.misfits"


UNFIT = [
    (
        ("data=rotated_digits",),
        "task=classification: targets are float32 [1437]; they must be class indices, int64 "
        "[samples], of data with a known number of classes",
    ),
    (
        ("task=language_modelling", "data=text", f"data.path={ROOT}/docs", "model=mlp"),
        "model: does not accept token ids, int64 [128], the inputs in this data: mat1 and mat2 "
        "must have the same dtype, but got Long and Float",
    ),
    (
        ("task=language_modelling", "data=text", f"data.path={ROOT}/docs", "model=lenet"),
        "model=lenet: inputs of shape [128] are not images; the model needs [channels, height, "
        "width]",
    ),
    (
        ("task=language_modelling", "data=text", "channels_last=true"),
        "channels_last=true: inputs of shape [128] are not images [channels, height, width]; "
        "leave it false",
    ),
    (
        (f"model._target_={MISFITS}.one_output_too_many",),
        "task=classification: the model's outputs are float32 [1, 11]; with these targets "
        "they must be floating-point [batch, 10]",
    ),
    (
        (f"model._target_={MISFITS}.no_module",),
        f"model={MISFITS}.no_module: returns type tuple; it must return a torch.nn.Module",
    ),
]


def test_misfits_are_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told(*(settings for settings, _ in UNFIT)) == [line for _, line in UNFIT]
    assert not list(tmp_path.rglob("record.json"))


def test_sparse_embeddings_train_by_any_strategy_as_dense_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = f"model={MISFITS}.embedded", "steps=3", "seed=3"
    ways = ("false", "none"), ("true", "none"), ("true", "ddp")
    runs = [train(1, *settings, f"model.sparse={a}", f"strategy={b}")[0] for a, b in ways]
    losses = [run.record["final"]["loss"] for run in runs]
    assert losses == [losses[0]] * 3


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
    shown = recording.summary(Record.from_json(record), tmp_path)
    assert f"mae             {last['mae']:.4g}" in shown


def test_a_language_model_learns_over_ranks_and_resumes_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "bigram.yaml").write_text(
        "_target_: tests.e2e.misfits.Bigram\nwidth: 8\n"
    )
    data = ("data=text", f"data.path={ROOT}/docs", "data.suffix=.md", "data.context=32")
    settings = ("task=language_modelling", "config_dir=conf", "model=bigram", *data)
    settings += ("strategy=onebit", "batch_size=32", "optim.lr=4", "warmup_steps=2")
    once = train(2, *settings, "steps=20", "eval_every=10", "checkpoint_every=10", "cell=a")
    record = once[0].record
    first, last = record["evaluations"]
    assert record["final"] == {name: last[name] for name in ("loss", "perplexity")}
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert last["perplexity"] < first["perplexity"] < 256  # of a model that knows nothing
    assert (record["unit"], record["prediction"]) == ("sequence", "token")
    assert record["predictions_per_sample"] == 32

    read = Record.from_json(record)
    assert read.data_source and read.data_source.endswith(f" files, {ROOT}/docs")
    rate = read.wall_samples_per_s or 0
    shown = recording.summary(read, tmp_path)
    assert f"perplexity      {last['perplexity']:.2f} on test data" in shown
    assert f"speed           {rate:.0f} sequences/s, {32 * rate:.0f} tokens/s, wall" in shown
    assert f"data            {read.data_source}" in shown

    checkpoint = "resume=runs/default/a/checkpoints/step_000010"
    again = train(2, *settings, "steps=20", checkpoint, "cell=b")
    assert again[0].record["attempts"][0]["first_step"] == 10
    for one, other in zip(once, again, strict=True):
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
