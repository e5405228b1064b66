"""Studies that are odd as strangers' may be: all is shown, or a line says what is the matter."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lab import explain, plot, report, sweep
from lab.record.schema import read_record
from tests.attack.files import CELL, STUDY, make_files
from tests.support.commands import refusal, said
from tests.support.ranks import told


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_files(Path())
    return Path(STUDY)


def in_two_ways_of_unicode(study: Path) -> None:
    (study / CELL).rename(study / "caf\u00e9")
    shutil.copytree(study / "caf\u00e9", study / "cafe\u0301")


@pytest.mark.parametrize(
    "change",
    [
        lambda study: (study / "copy").symlink_to(CELL),
        in_two_ways_of_unicode,
        lambda study: shutil.copy(study / "none-n1-0/record.json", study / CELL / "record.json"),
    ],
    ids=["a link", "names of one look", "another's record"],
)
def test_a_cell_that_is_there_twice_is_named(study: Path, change: Callable[[Path], object]) -> None:
    change(study)
    assert "are the same cell" in refusal(plot.main, STUDY)


def test_links_to_the_parent_and_to_themselves_are_no_cells(study: Path) -> None:
    (study / "up").symlink_to("..")
    (study / "self").symlink_to("self")
    assert "wrote" in said(plot.main, STUDY, "only=speedup", "format=svg")


def test_commits_and_versions_of_torch_may_differ(study: Path) -> None:
    for path, commit, torch in zip(
        sorted(study.glob("*/record.json")),
        (None, "dirty", "0a1b"),
        ("2.9", "2.10", "2.13"),
        strict=False,
    ):
        record = read_record(path)
        environment = {**record.environment, "commit": commit, "torch": torch}
        replace(record, environment=environment).write(path)
    for command, words in ((plot, ("only=speedup", "format=svg")), (report, ()), (explain, ())):
        assert said(command.main, STUDY, *words)


def test_figures_are_the_same_twice(study: Path) -> None:
    drawn = dict[str, dict[str, bytes]]()
    for out in "xy":
        said(plot.main, STUDY, f"out={out}", "format=svg,png")
        drawn[out] = {path.name: path.read_bytes() for path in Path(out).iterdir()}
    assert drawn["x"] == drawn["y"] and len(drawn["x"]) > 4  # PDFs have random names of fonts


def test_places_of_figures_and_pages(study: Path) -> None:
    (study / "figures").touch()
    assert "figures" in refusal(plot.main, STUDY)
    assert "wrote" in said(report.main, STUDY, "out=a#b?c%20.html")
    assert Path("a#b?c%20.html").stat().st_size
    assert "z.html" in refusal(report.main, STUDY, "out=/proc/z.html")


def test_a_saved_grid_with_a_setting_that_is_gone_is_refused(study: Path) -> None:
    saved = json.loads((study / "study.json").read_text())
    saved["grids"][0]["arguments"].append("overlap_mb=3")
    (study / "study.json").write_text(json.dumps(saved))
    assert "overlap_mb=3: no such setting" in refusal(sweep.main, "study=made")


def mislead_by_times(cell: Path) -> None:
    os.utime(cell / "checkpoints/step_000004", (4e9, 4e9))
    os.utime(cell / "checkpoints/step_000006", (9e4, 9e4))


@pytest.mark.parametrize(
    "change", [mislead_by_times, lambda cell: (cell / "attempts.json").unlink()]
)
def test_a_run_goes_on_from_its_last_step_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ("model=mlp", "data.size=16", "batch_size=24", "cell=a")
    assert told((*run, "steps=6", "checkpoint_every=2")) == [""]
    cell = Path("runs/default/a")
    (cell / "record.json").unlink()
    change(cell)
    assert told((*run, "steps=12", "resume=auto")) == [""]
    record = read_record(cell / "record.json")
    assert (record.num_steps, record.attempts[-1]["first_step"]) == (12, 6)
