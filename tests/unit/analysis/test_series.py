"""Runs that differ in anything that matters are never merged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.analysis.points import table
from lab.analysis.records import load_study, usual_values
from lab.record.schema import StepSeconds, read_record
from tests.support.records import leave, make_record

TREE = {"exchange._target_": "lab.exchange.paths.Tree", "exchange.chunk_mb": None}
ONEBIT = {"exchange._target_": "lab.exchange.compressed.OneBit", "exchange.block_size": 256}
GIGABIT = {"cluster.rate": "1gbit"}


def series(folder: Path, *runs: dict[str, Any], strategy: str = "tree") -> list[str]:
    """Leave a run for each set of changes to its record, and return the names of their series."""
    for number, changes in enumerate(runs):
        leave(folder / str(number), make_record(**{"strategy": strategy, **changes}))
    return [row.series for row in table(load_study(folder))]


def make(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"world_size": 2, "seconds": 1.0, "settings": settings, **changes}


def test_runs_over_other_links_are_another_series_though_nobody_typed_the_rate(
    tmp_path: Path,
) -> None:
    found = series(tmp_path, make(TREE | GIGABIT), make(TREE | {"cluster.rate": "100mbit"}))
    assert found == ["tree cluster.rate=1gbit", "tree cluster.rate=100mbit"]


def test_a_typed_default_is_no_difference(tmp_path: Path) -> None:
    typed = make(TREE | GIGABIT, variant={"cluster.rate": "1gbit"}, repeat=1)
    assert series(tmp_path, make(TREE | GIGABIT), typed) == ["tree"]


def test_a_condition_of_one_strategy_alone_is_named_too(tmp_path: Path) -> None:
    slow = make(ONEBIT | {"cluster.rate": "100mbit"}, strategy="onebit")
    found = series(tmp_path, make(TREE | GIGABIT), slow)
    assert found == ["tree cluster.rate=1gbit", "onebit cluster.rate=100mbit"]


def test_what_a_strategy_brings_with_it_is_in_its_name(tmp_path: Path) -> None:
    assert series(tmp_path, make(TREE), make(ONEBIT, strategy="onebit")) == ["tree", "onebit"]


def test_an_exchange_of_other_settings_is_another_series(tmp_path: Path) -> None:
    other = ONEBIT | {"exchange.block_size": 64}
    found = series(tmp_path, make(ONEBIT), make(other), strategy="onebit")
    assert found == ["onebit exchange.block_size=64", "onebit exchange.block_size=256"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"environment": {"num_cores": 2}}, {"environment": {"num_cores": 4}}),
        ({"environment": {"memory_gib": 16}}, {"environment": {"memory_gib": 24}}),
        ({"environment": {"torch": "2.9.0"}}, {"environment": {"torch": "2.13.0"}}),
        ({"model_source": "0123abcd"}, {"model_source": "4567cdef"}),
        ({"precision": "fp32"}, {"precision": "bf16"}),
    ],
)
def test_another_machine_or_code_is_another_series(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    assert len(set(series(tmp_path, make(TREE, **first), make(TREE, **second)))) == 2


def test_a_failed_run_and_its_successor_are_no_copies(tmp_path: Path) -> None:
    assert series(tmp_path, make(TREE, seconds=None), make(TREE)) == ["tree"]


def test_records_without_settings_are_told_apart_as_typed(tmp_path: Path) -> None:
    found = series(tmp_path, make({}, variant={"bucket_mb": "1"}), make({}, repeat=1))
    assert found == ["tree", "tree bucket_mb=1"]


def test_usual_values_are_noted_in_the_order_of_the_runs() -> None:
    values = {f"key{number}": "1" for number in range(9)}
    runs = [(name, values) for name in ("tree", "ring", "onebit")]
    assert list(usual_values(runs)) == list(values)  # a set would differ from run to run


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"step_s": StepSeconds(0.0, 1.0, 0.0)}, "step_s.median=0"),
        ({"step_s": StepSeconds(math.inf, 1.0, 0.0)}, "step_s.median=inf"),
        ({"step_s": StepSeconds(math.nan, 1.0, 0.0)}, "step_s.median=nan"),
        ({"wall_samples_per_s": -3.0}, "wall_samples_per_s=-3"),
        ({"world_size": 0}, "world_size=0"),
    ],
)
def test_a_record_of_a_value_that_no_run_can_have_is_damaged(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    leave(tmp_path / "right", make_record("none", 1, 1.0))
    leave(tmp_path / "wrong", make_record("tree", 2, 1.0))
    path = tmp_path / "wrong" / "record.json"
    # As other programs write them: the lab's own writes null for what is not finite.
    path.write_text(json.dumps(replace(read_record(path), **changes).to_json()))
    study = load_study(tmp_path)
    assert [cell.name for cell in study.cells] == ["right"]
    assert study.missing["wrong"].endswith(f"{why}: must be above 0 and finite")
