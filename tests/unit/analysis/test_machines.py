"""Studies of two machines are shown together: told apart, compared apart, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lab.analysis import summary
from lab.analysis.points import table
from lab.analysis.records import labels_of, load_study, named_by_study
from lab.draw.chart import LOOKS, looks_of
from lab.measure import Span
from lab.plot import main
from lab.record.trace import TIMELINE, write_trace
from tests.support.records import leave, make_record
from tests.support.svg import outside, overlapping

BIG = {"cpu": "a large processor", "num_cores": 8, "memory_gib": 32, "torch": "2.13.0"}
SMALL = {"cpu": "a small processor", "num_cores": 2, "memory_gib": 8, "torch": "2.13.0"}


def write(study: Path, environment: dict[str, Any], factor: float, *strategies: str) -> Path:
    """Write a study of 1 and 2 ranks on a machine `factor` times as slow; its tree adds 0.1 s."""
    for strategy in strategies:
        for ranks in (1, 2):
            seconds = factor * (1 / ranks + (0.1 if strategy == "tree" and ranks > 1 else 0))
            record = make_record(strategy, ranks, seconds, environment=environment)
            leave(study / f"{strategy}-{ranks}", record)
    return study


@pytest.fixture
def studies(tmp_path: Path) -> list[Path]:
    return [
        write(tmp_path / "m1/runs/demo", BIG, 1.0, "none", "tree"),
        write(tmp_path / "m2/runs/demo", SMALL, 3.0, "none", "tree"),
    ]


def test_each_machine_is_compared_with_itself(studies: list[Path]) -> None:
    for series, exposed_s in (("tree on=m1", 0.1), ("tree on=m2", 0.3)):
        (row,) = (r for r in table(load_study(*studies)) if (r.series, r.world_size) == (series, 2))
        assert row.speedup.mid == pytest.approx(1 / 0.6)
        assert row.exposed_exchange_s.mid == pytest.approx(exposed_s)
        assert row.baseline == series.replace("tree", "none")


def test_studies_of_one_machine_are_one_study(tmp_path: Path) -> None:
    first = write(tmp_path / "a", BIG, 1.0, "none", "tree")
    second = write(tmp_path / "b", BIG, 1.0, "ring")
    study = load_study(first, second)
    assert {row.series for row in table(study)} == {"none", "tree", "ring"}
    assert study.machines == {}
    third = write(tmp_path / "c", SMALL, 1.0, "ring")
    names = {row.series for row in table(load_study(first, second, third))}
    assert names == {"none on=a+b", "tree on=a+b", "ring on=a+b", "ring on=c"}


def test_a_study_of_two_machines_keeps_the_names_of_what_differs(tmp_path: Path) -> None:
    mixed = write(tmp_path / "a", BIG, 1.0, "none")
    write(mixed, SMALL, 1.0, "tree")
    other = write(tmp_path / "b", SMALL, 1.0, "ring")
    names = {row.series for row in table(load_study(mixed, other))}
    assert len(names) == 3 and all("num_cores=" in name and "on=" not in name for name in names)


def test_copies_are_refused_by_their_names(tmp_path: Path) -> None:
    same = [write(tmp_path / name, BIG, 1.0, "tree") for name in "ab"]
    with pytest.raises(ValueError, match=r"a/tree-1 and b/tree-1 are the same cell, repeat=0"):
        load_study(*same)
    with pytest.raises(ValueError, match=r"a .*a: the same folder is given twice"):
        load_study(same[0], tmp_path / "." / "a")


def test_failures_and_lost_cells_are_named_with_their_study(studies: list[Path]) -> None:
    leave(studies[1] / "ring-2", make_record("ring", 2, None, error="no"))
    (studies[0] / "killed").mkdir()
    study = load_study(*studies)
    text = summary.text(table(study), study)
    assert "failed: m2/ring-2: no" in text and "missing: m1/killed: left no record.json" in text


@pytest.mark.parametrize(
    ("folders", "labels"),
    [
        (("m1/runs/demo", "m2/runs/demo"), ["m1", "m2"]),
        (("runs/a", "runs/b"), ["a", "b"]),
        (("runs/a b", "x/y/b"), ["runs-a_b", "x-y-b"]),
        (("runs", "runs/a"), ["runs", "runs/a"]),
    ],
)
def test_labels_are_what_paths_do_not_share(folders: tuple[str, ...], labels: list[str]) -> None:
    assert labels_of([Path(folder) for folder in folders]) == labels


def test_without_a_difference_nothing_is_renamed() -> None:
    assert named_by_study([{"steps": "3"}, {}], ["a", "b"]) == ([{"steps": "3"}, {}], {})


@pytest.mark.parametrize("key", ["on", "cluster.rate"])
def test_a_machine_or_setting_is_another_line_in_the_colour_of_the_strategy(key: str) -> None:
    names = [f"{strategy} {key}={value}" for strategy in ("tree", "bf16") for value in "abc"]
    looks = looks_of(names)
    assert len(set(looks.values())) == len(names)
    for name, look in looks.items():
        known = LOOKS[name.split(" ")[0]]
        assert (look.colour, look.marker) == (known.colour, known.marker)


def test_figures_of_both_are_beside_those_of_one(studies: list[Path]) -> None:
    for study in studies:
        spans = [Span(0, "step", "step 1", 0.0, 1.0), Span(0, "forward", "forward", 0.0, 0.5)]
        write_trace(study / "tree-2" / TIMELINE, spans)
    assert main([*map(str, studies), "format=svg", "only=scaling,timeline"]) == 0
    out = studies[0].parent / "m1+m2"
    names = {path.name for path in out.iterdir()}
    assert {"summary.csv", "records.csv", "timeline_m1_tree-2.svg"} <= names
    assert "timeline_m2_tree-2.svg" in names  # of cells of the same name, none is overwritten
    assert not (studies[0] / "figures").exists()
    assert len(pd.read_csv(out / "records.csv")) == 8
    drawn = (out / "scaling.svg").read_text()
    assert overlapping(drawn) == outside(drawn) == []
    assert ">tree on=m1<" in drawn and ">tree on=m2<" in drawn
    assert "on=m1: a large processor, 8 cores" in drawn
