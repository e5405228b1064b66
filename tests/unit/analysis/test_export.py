"""records.csv and records.parquet hold every value of every record."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lab.analysis.records import load_study
from lab.analysis.summary import records_table, write_records
from lab.record.schema import Bucket, Record
from tests.support.records import leave, make_record

EVALUATIONS = [{"step": 3, "loss": 0.5}]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    settings: dict[str, Any] = {"optim.lr": 0.1, "bucket_mb": None, "model.hidden": [64, 32]}
    done = make_record("tree", 2, 0.5, settings=settings, final={"accuracy": 0.75})
    done.evaluations = [{**each} for each in EVALUATIONS]
    done.buckets = [Bucket(28, "fc.bias fc.weight")]
    leave(tmp_path / "a", done)
    other: dict[str, Any] = {"optim.lr": 1, "bucket_mb": 25, "model.hidden": "small"}
    leave(tmp_path / "b", make_record("ring", 1, None, settings=other, error="rank 0: no"))
    return tmp_path


def test_a_row_holds_everything_that_its_record_has(study: Path) -> None:
    table = records_table(load_study(study)).set_index("folder")
    fields = {field.name for field in dataclasses.fields(Record)}
    found = {name.partition(".")[0] for name in table.columns} - {"schema", "series"}
    # An empty mapping has no columns, in any of the records.
    assert fields - found == {"variant", "phases_s", "comm_settings", "environment", "git_commit"}
    assert table.loc["a", "step_s.median"] == 0.5 and pd.isna(table.loc["b", "step_s.median"])
    assert table["status"].to_dict() == {"a": "done", "b": "failed"}
    assert table["settings.optim.lr"].to_dict() == {"a": 0.1, "b": 1.0}
    assert table.loc["a", "final.accuracy"] == 0.75
    assert table.loc["b", "error"] == "rank 0: no"
    assert json.loads(str(table.loc["a", "evaluations"])) == EVALUATIONS
    assert json.loads(str(table.loc["a", "buckets"]))[0]["bytes"] == 28
    assert table["series"].str.startswith(("tree", "ring")).all()


def test_values_of_several_types_are_text(study: Path) -> None:
    table = records_table(load_study(study)).set_index("folder")
    assert table["settings.model.hidden"].to_dict() == {"a": "[64, 32]", "b": "small"}
    path = study / "a" / "record.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"settings": {"bucket_mb": True, "optim.lr": "x"}}))
    table = records_table(load_study(study)).set_index("folder")
    assert table["settings.optim.lr"].to_dict() == {"a": "x", "b": "1"}
    assert table["settings.bucket_mb"].to_dict() == {"a": "true", "b": "25"}


@pytest.mark.parametrize("name", ["to_csv", "to_parquet"])
def test_a_full_disk_leaves_the_tables_that_were_there(
    study: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def write(_: pd.DataFrame, path: Path, index: bool) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    path = study / f"records.{name.removeprefix('to_')}"
    path.write_text("old")
    monkeypatch.setattr(pd.DataFrame, name, write)
    with pytest.raises(OSError, match=f"No space left on device: .*{path.name}'"):
        write_records(records_table(load_study(study)), study)
    assert path.read_text() == "old"


def test_both_files_hold_the_same(study: Path, tmp_path: Path) -> None:
    write_records(records_table(load_study(study)), tmp_path)
    csv, parquet = (
        pd.read_csv(tmp_path / "records.csv"),
        pd.read_parquet(tmp_path / "records.parquet"),
    )
    assert list(csv) == list(parquet) and len(csv) == len(parquet) == 2
    for name in ("world_size", "step_s.median", "settings.optim.lr", "settings.bucket_mb"):
        left, right = csv[name].astype(float), parquet[name].astype(float)
        assert left.equals(right.astype(float)), name
    assert parquet["world_size"].dtype == "Int64"
