"""The record: written and read, wrong ones refused, older ones read as before."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.analysis import summary
from lab.analysis.points import table
from lab.analysis.records import load_study, read_steps
from lab.record.schema import (
    SCHEMA,
    Bucket,
    Emulation,
    Record,
    Stretch,
    append_stretch,
    read_record,
    stretches_of,
    worded,
)
from lab.record.steps import write_rows
from tests.support.records import leave, make_record

BEFORE = Path(__file__).parents[2] / "data" / "study_schema_1"
STUDY = BEFORE / "before"


def full_record() -> Record:
    shared = Emulation("shared_cores", "4 threads of 2 ranks share 2 CPU cores")
    replay = Emulation("replay", "compute replayed from profile alexnet_titanx")
    return make_record(
        "onebit",
        2,
        0.5,
        variant={"bucket_mb": "4"},
        untransformed={"num_parameters": 7, "gradient_bytes": 28},
        phases_s={"data": 0.1, "update": None},
        messages_per_step=[4.0, 3.5],
        evaluations=[{"step": 3, "loss": 0.1, "accuracy": None}],
        buckets=[Bucket(28, "fc.bias fc.weight")],
        idle=["one rank: strategy=onebit has nothing to exchange"],
        choices=[{"bucket": "fc", "chosen": "OneBit", "plain_s": 0.1}],
        environment={"cpu": "a processor", "gpus": []},
        emulation=[shared, replay],
    )


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = full_record()
    leave(tmp_path / "a", record)
    written = json.loads((tmp_path / "a" / "record.json").read_text())
    assert written["schema"] == SCHEMA
    assert written.keys() - {"schema"} == {field.name for field in dataclasses.fields(Record)}
    assert read_record(tmp_path / "a" / "record.json") == record


def test_a_record_from_before_buckets_were_recorded_is_read(tmp_path: Path) -> None:
    leave(tmp_path / "a", full_record())
    path = tmp_path / "a" / "record.json"
    written = json.loads(path.read_text())
    del written["buckets"], written["idle"]
    path.write_text(json.dumps(written))
    record = read_record(path)
    assert (record.buckets, record.idle) == (None, [])


def test_a_number_that_is_not_finite_is_unknown(tmp_path: Path) -> None:
    leave(tmp_path / "a", make_record("none", 1, 0.5, final={"loss": math.nan}))
    assert read_record(tmp_path / "a" / "record.json").final == {"loss": None}


def test_every_attribute_of_a_record_is_explained() -> None:
    text = (Record.__doc__ or "").partition("Attributes:")[2]
    starts = (line.strip().partition(":")[0] for line in text.splitlines() if ":" in line)
    explained = {name.strip() for start in starts for name in start.split(",")}
    assert {field.name for field in dataclasses.fields(Record)} <= explained


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": None}, "world_size=null: must be int"),
        ({"world_size": True}, "world_size=True: must be int"),
        ({"step_s": {"median": 1.0, "p95": 1.0}}, "step_s.mad: is missing"),
        ({"messages_per_step": [1.0, "2"]}, r"messages_per_step\[1\]='2': must be float"),
        ({"variant": {"steps": 6}}, "variant.steps=6: must be str"),
        (
            {"emulation": [{"kind": "dream", "detail": ""}]},
            r"emulation\[0\].kind='dream': must be one of hosts, shared_gpus, shared_cores, "
            "replay, straggler",
        ),
        ({"schema": 1}, r"emulation=\[.*: must be str in a record of schema 1"),
        ({"schema": 3}, "schema=3: this version of the lab reads only 1 and 2"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Record.from_json(full_record().to_json() | change)


def test_a_rate_is_in_samples_and_in_predictions_if_there_are_several() -> None:
    tokens = {"unit": "sequence", "prediction": "token", "predictions_per_sample": 128}
    assert make_record("none", 1, 0.5).rates(93.4) == "93 images/s"
    assert make_record("none", 1, 0.5).rates(0.04) == "0.04 images/s"
    assert make_record("none", 1, 0.5, **tokens).rates(93.5) == "94 sequences/s, 11968 tokens/s"


def test_how_a_run_ended_is_one_of_few_words() -> None:
    record = make_record("none", 1, None)
    record.end("oom", "rank 1: out of memory")
    assert (record.status, record.error) == ("oom", "rank 1: out of memory")
    with pytest.raises(ValueError, match="status='gone': must be one of done, failed, oom"):
        record.end("gone", None)


@pytest.mark.parametrize(
    ("clause", "kind"),
    [
        ("2 hosts as network namespaces, links of 1gbit (tbf)", "hosts"),
        ("4 ranks share 1 GPUs", "shared_gpus"),
        ("8 threads of 4 ranks share 2 CPU cores", "shared_cores"),
        ("compute replayed from profile alexnet_titanx", "replay"),
    ],
)
def test_schema_1_worded_each_kind_of_emulation(clause: str, kind: str) -> None:
    old = {"schema": 1, "status": "failed", "emulation": f"{clause}; 4 ranks share 1 GPUs"}
    record = Record.from_json(old)
    assert [one.kind for one in record.emulation] == [kind, "shared_gpus"]
    assert worded(record.emulation) == old["emulation"]


def test_schema_1_counted_images() -> None:
    old = json.loads((STUDY / "onebit-n2-r0" / "record.json").read_text())
    record = Record.from_json(old)
    assert record.unit == "image"
    assert record.samples_per_s == old["images_per_s"]
    assert record.wall_samples_per_s == old["wall_images_per_s"]
    assert record.to_json()["step_s"].items() >= old["step_s"].items()
    same = old.keys() - {"schema", "emulation", "images_per_s", "wall_images_per_s", "step_s"}
    assert {key: record.to_json()[key] for key in same} == {key: old[key] for key in same}


def test_a_study_of_schema_1_gives_the_tables_it_gave_then(tmp_path: Path) -> None:
    study = load_study(STUDY)
    rows = table(study)
    assert summary.text(rows, study) + "\n" == (BEFORE / "summary.txt").read_text()
    summary.write_csv(rows, tmp_path / "summary.csv")
    now, then = csv_of(tmp_path / "summary.csv"), csv_of(BEFORE / "summary.csv")
    for row, expected in zip(now, then, strict=True):
        key = "batch_size" if row["scaling"] == "strong" else "per_rank_batch_size"
        assert row[key] == expected.pop("batch")
        found = {name.replace("samples_per_s", "images_per_s"): row[name] for name in row}
        for name, value in expected.items():
            assert read(found[name]) == pytest.approx(read(value), rel=1e-9), (row["series"], name)


def csv_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def made(first: int, end: int, **others: Any) -> Stretch:
    return replace(Stretch(first, end, "s/a", 2, 8, "abc", {"lr": 1}), **others)


def test_steps_made_alike_are_one_stretch() -> None:
    assert append_stretch([], made(0, 5)) == [made(0, 5)]
    assert append_stretch([made(0, 5)], made(5, 9)) == [made(0, 9)]
    assert stretches_of(append_stretch([made(0, 5)], made(5, 9))) == []


def test_a_run_that_made_no_step_adds_none() -> None:
    assert append_stretch([made(0, 5)], made(5, 5, cell="s/b")) == [made(0, 5)]
    assert append_stretch([], made(0, 0)) == []


def test_steps_of_another_cell_settings_ranks_and_commit_are_told() -> None:
    moved = (
        {"task._target_": "lab.task.old.Regression"},
        {"task._target_": "lab.task.new.Regression"},
    )
    then = made(0, 5, settings={"lr": 1, "seed": 3, **moved[0]}, world_size=1, commit=None)
    now = made(5, 9, cell="s/b", settings={"lr": 2, **moved[1]})
    first, second = stretches_of(append_stretch([then], now))
    assert (first.steps, second.steps, made(3, 4).steps) == ("0-4", "5-8", "3")
    assert first.settings == {"lr": 1, "seed": 3} and second.settings == {}
    assert first.made_by == "s/a on 1 rank, batch_size=8, commit unknown; lr=1, seed=3"
    assert second.made_by == "s/b on 2 ranks, batch_size=8, commit abc"


def test_steps_before_a_resume_are_kept_but_timed_no_more(tmp_path: Path) -> None:
    """The statistics are of the last start, which may have had other ranks."""
    path = tmp_path / "steps.parquet"
    columns = {"rank": [0, 0, 0, 1, 1, 1], "step": [0, 1, 2] * 2, "timed": [False, True, True] * 2}
    write_rows(path, 0, columns)
    write_rows(path, 2, {"rank": [0, 0], "step": [2, 3], "timed": [False, True]})
    rows = read_steps(path)
    assert rows["step"].tolist() == [0, 1, 0, 1, 2, 3]
    assert rows["timed"].tolist() == [False] * 5 + [True]
    rows.drop(columns="timed").to_parquet(path)  # as an early version left it
    write_rows(path, 3, {"rank": [0], "step": [3], "timed": [True]})
    assert read_steps(path)["timed"].tolist() == [False] * 5 + [True]
