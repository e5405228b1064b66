"""The commands as functions: tables, texts and charts, and settings as keywords."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab import ConfigError, api
from lab.draw.chart import drawn
from tests.support.records import leave, make_record


def test_a_prediction_is_a_table_a_text_and_a_chart() -> None:
    found: Any = api.predict(
        {"hardware.inter.bandwidth_bytes_per_s": 1e9},
        strategy=["tree", "onebit"],
        world_size=[1, 4],
        profile="resnet50_p100",
        hardware="eth10g",
    )
    assert list(found.frame["series"]) == ["tree", "onebit"] * 2
    assert found.frame["speedup"][3] > found.frame["speedup"][2]
    assert str(found).startswith("strategy") and "<table" in str(found._repr_html_())
    assert drawn(found.figure().to_dict(), "svg")


def test_advice_has_exact_and_lossy_ways() -> None:
    cell: Any = {"hardware": "eth25g", "world_size": [8], "batch_size": 512}
    found = api.advise(profile="resnet50_p100", strategy=["ring", "onebit"], **cell)
    assert set(found.frame["lossy"]) == {True, False}
    assert found.frame["samples_per_s"].is_monotonic_decreasing
    assert "first choice, exact" in found.text and drawn(found.figure().to_dict(), "svg")


def test_a_study_and_one_of_its_runs_are_explained(tmp_path: Path) -> None:
    for name, size in (("none", 1), ("none", 2), ("tree", 2)):
        leave(tmp_path / "s" / f"{name}{size}", make_record(name, size, 1.0 if size == 1 else 0.8))
    study, run = api.explain(tmp_path / "s"), api.explain(tmp_path / "s/tree2")
    assert list(study.frame["series"]) == ["none", "tree"]
    assert all(str(reason) in study.text for reason in study.frame["reason"])
    assert list(run.frame) == ["change", "why", "saves_s"] and run.text.startswith(
        "tree on 2 ranks"
    )


def test_wrong_settings_are_those_of_the_commands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stratgy=tree: no such setting; did you mean strategy"):
        api.predict(stratgy="tree")
    with pytest.raises(ConfigError, match="optim.rate=1: no such setting"):
        api.sweep("s", {"optim.rate": 1}, runs_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="none: no such folder"):
        api.explain(tmp_path / "none")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (0.1, "0.1"),
        (Path("a/b"), "a/b"),
        ([1, "a", None, Path("c")], "1,a,null,c"),
    ],
)
def test_values_are_written_as_a_command_line_has_them(value: api.Setting, text: str) -> None:
    assert api._words({"key": value}) == [f"key={text}"]
