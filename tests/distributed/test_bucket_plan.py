"""The record holds the buckets that were exchanged, and says which settings did nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.record.schema import Record
from lab.training.recording import summary
from tests.support.ranks import train

RUN = ("data.size=16", "batch_size=24", "steps=2", "model=mlp", "model.hidden=[32]")


@pytest.fixture
def record_of(tmp_path: Path) -> Any:
    return lambda *settings: train(2, *RUN, f"runs_dir={tmp_path}", *settings)[0].record


def test_buckets_are_all_parameters_in_the_order_in_which_they_leave(record_of: Any) -> None:
    record = record_of("strategy=overlap", "bucket_mb=0.002")
    buckets = record["buckets"]
    names = [name for bucket in buckets for name in bucket["parameters"].split(" ")]
    assert len(buckets) > 1 and len(names) == len(set(names)) == 4
    assert sum(bucket["bytes"] for bucket in buckets) == record["gradient_bytes"]
    assert names[0].rpartition(".")[0] > names[-1].rpartition(".")[0]  # the last layer's first
    assert record["idle"] == []


def test_what_does_nothing_is_recorded_and_printed(record_of: Any, tmp_path: Path) -> None:
    record = record_of("strategy=overlap")
    assert [b["bytes"] for b in record["buckets"]] == [record["gradient_bytes"]]
    (line,) = record["idle"]
    assert line.startswith("overlap=true: nothing overlaps, because all ")
    assert f"no effect       {line}" in summary(Record.from_json(record), tmp_path).splitlines()


def test_a_library_keeps_its_buckets_to_itself(record_of: Any) -> None:
    record = record_of("strategy=ddp")
    assert (record["buckets"], record["idle"]) == (None, [])


@pytest.mark.parametrize("strategy", ["onebit", "ddp sync.hook=lab exchange=onebit"])
def test_what_a_codec_leaves_as_it_is_is_recorded(record_of: Any, strategy: str) -> None:
    record = record_of(*f"strategy={strategy} model.hidden=[48,48,48]".split(), "bucket_mb=0.02")
    which = "vectors, and rows shorter than exchange.min_columns=64"
    # 256 x 48 values are quantised, of 256 x 48 + 2 x 48 x 48 + 48 x 10, and 154 of biases.
    line = f"30 % of the values are sent as float32 (5,242 of 17,530): {which}"
    assert record["idle"] == [line]
