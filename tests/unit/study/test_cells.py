"""The state of cells: done, to run again, and what a dry run says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab import sweep
from lab.record.schema import Record, Status, read_record
from lab.settings.config import load
from lab.settings.overrides import handed_over, quoted
from lab.study import dry_run, launch
from lab.study.grid import Cell, read
from lab.study.launch import make_directory, recorded
from lab.study.run import outcome_text
from tests.support.commands import said
from tests.support.records import make_record

GRID = ("study=s", "strategy=tree,onebit", "world_size=1,2", "batch_size=64", "steps=8")


def leave(root: Path, cell: Cell, status: Status, duration_s: float | None = None) -> Record:
    record = make_record(cell.strategy, cell.world_size, 0.1 if status == "done" else None)
    about = {"cell": cell.name, "settings": cell.settings, "duration_s": duration_s}
    record = replace(record, status=status, **about)
    (root / cell.name).mkdir(parents=True)
    record.write(root / cell.name / "record.json")
    return record


@pytest.mark.parametrize(
    ("status", "runs", "runs_with_retry"),
    [
        *(("done", False, False), ("interrupted", True, True)),
        *(("failed", False, True), ("oom", False, True), ("timeout", False, True)),
    ],
)
def test_which_cells_run_again(
    tmp_path: Path, status: Status, runs: bool, runs_with_retry: bool
) -> None:
    cell = read(GRID).cells[0]
    leave(tmp_path, cell, status)
    assert (recorded(tmp_path, cell, retries=False) is None) is runs
    assert (recorded(tmp_path, cell, retries=True) is None) is runs_with_retry


def test_a_failed_attempt_is_kept_and_leftovers_are_not(tmp_path: Path) -> None:
    cell = read(GRID).cells[0]
    first = leave(tmp_path, cell, "oom")
    (tmp_path / cell.name / "checkpoints").mkdir()
    directory = make_directory(tmp_path, cell)
    assert [path.name for path in directory.iterdir()] == ["failed-1"]
    assert read_record(directory / "failed-1/record.json") == first
    assert (directory / "failed-1/checkpoints").is_dir()

    (directory / "checkpoints").mkdir()
    (directory / "output.log").touch()  # of an attempt that was killed
    assert [path.name for path in make_directory(tmp_path, cell).iterdir()] == ["failed-1"]
    second = replace(first, status="timeout")
    second.write(directory / "record.json")
    assert sorted(p.name for p in make_directory(tmp_path, cell).iterdir()) == [
        "failed-1",
        "failed-2",
    ]
    assert read_record(directory / "failed-2/record.json") == second


def test_the_record_of_a_cell_that_left_none_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_MODEL_API_TOKEN_0", "put back")
    (cell,) = read([*GRID[2:], "world_size=2", *handed_over(["+model.api_token='hunter2'"])]).cells
    record = launch.record_of(make_directory(tmp_path, cell), cell, "failed", "lost")
    assert record.settings["model.api_token"] == "…"


def test_cells_that_take_turns_each_record_why_they_did_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell for cell in read(GRID).cells if cell.world_size == 1]
    # As ranks do that refuse a setting: what they claimed, and did not write in, is gone.
    script = f"rmdir {tmp_path / cells[1].name}; echo 'lab.train: error: turns=9: too many'; exit 2"
    monkeypatch.setattr(launch, "starter", lambda *_: ["sh", "-c", script])
    records = launch.run_cells(tmp_path, cells, 9, 60)
    assert [record.error for record in records] == ["turns=9: too many"] * len(cells)


def test_a_dry_run_estimates_by_the_most_similar_cell_that_is_done(tmp_path: Path) -> None:
    study = read([*GRID, f"runs_dir={tmp_path}"])
    root = tmp_path / "s"
    tree_1, onebit_1, tree_2, _ = study.cells
    leave(root, tree_1, "done", 120)
    leave(root, tree_2, "done", 90)
    (root / tree_2.name / "steps.parquet").write_bytes(bytes(5_000_000))
    leave(root, onebit_1, "failed")
    head, *rows, failed, total = dry_run.lines(study)
    assert head.split("  ")[0] == "strategy"
    assert [row.split() for row in rows] == [
        ["tree", "1,2", "64", "2", "2", "0"],
        ["onebit", "1,2", "64", "2", "0", "1", "1.5", "5"],
    ]
    assert failed == "1 failed already (retry=failed runs it again)"
    assert total.startswith("would run 1 of 4 cells: about 1.5 min, 5 MB, estimated from the")
    *_, total = dry_run.lines(replace(study, own=replace(study.own, retry="failed")))
    assert total.startswith("would run 2 of 4 cells: about 3.5 min, 5 MB")


def test_cells_that_took_turns_share_the_time_of_their_start(tmp_path: Path) -> None:
    study = read([*GRID, f"runs_dir={tmp_path}"])
    for cell in study.cells[:2]:
        record = leave(tmp_path / "s", cell, "done", 120)
        together = replace(record, turns_s=[0.1], started_at="2026-11-01T10:00:00+00:00")
        together.write(tmp_path / "s" / cell.name / "record.json")
    *_, total = dry_run.lines(study)
    assert total.startswith("would run 2 of 4 cells: about 2 min")


def test_a_dry_run_knows_nothing_of_other_work(tmp_path: Path) -> None:
    root = tmp_path / "s"
    leave(root, read(GRID).cells[0], "done", 60)
    study = read([*GRID[:-1], f"runs_dir={tmp_path}", "steps=8,9", "world_size=2"])
    *_, total = dry_run.lines(study)
    assert total.startswith("would run 4 of 4 cells: about 2 min")
    assert total.endswith(f"; for 2 cells, {dry_run.UNKNOWN}")


def test_a_finished_sweep_names_its_folder_as_one_would_type_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["study=s", "strategy=none", "world_size=1"]
    for cell in read(settings).cells:
        leave(tmp_path / "runs" / "s", cell, "done")
    assert said(sweep.main, *settings).endswith(
        "1 of 1 cells done; figures: python -m lab.plot runs/s\n"
    )


@pytest.mark.parametrize("folder", ["jösé", "a b, [c=1] $d", "it's (mine)"])
def test_a_cell_is_told_its_folder_whatever_the_folders_name(tmp_path: Path, folder: str) -> None:
    study = read([f"runs_dir={quoted(str(tmp_path / folder))}", "study='x,y=1'", *GRID[1:]])
    assert (study.runs_dir, study.name) == (str(tmp_path / folder), "x,y=1")
    (cell, *_) = study.cells
    config = load(launch.settings_of(Path(study.runs_dir) / study.name, cell))
    assert [config.runs_dir, config.study, config.cell] == [study.runs_dir, study.name, cell.name]


@pytest.mark.parametrize("turns", ["null", "4"])
def test_a_sweep_tells_of_cells_that_are_done_and_of_others_as_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: str
) -> None:
    def run_cells(root: Path, cells: list[Cell], *_: object) -> list[Record]:
        return [leave(root, cell, "done") for cell in cells]

    monkeypatch.setattr(launch, "run_cells", run_cells)
    words = [*GRID[:2], "world_size=1", "repeats=2", f"turns={turns}", f"runs_dir={tmp_path}"]
    leave(tmp_path / "s", read(words).cells[0], "done")
    _, known, *lines, _ = said(sweep.main, *words).splitlines()
    assert known.endswith("/4] tree-n1-r0: done already")
    assert [line for line in lines if line[0] != "["] == ["2 cells take turns:"] * (turns == "4")
    ended = [line for line in lines if line[0] == "["]
    assert len(ended) == 3 and all("]" in line and ", ETA 0:0" in line for line in ended)


def test_a_cell_without_timed_steps_says_so() -> None:
    record = replace(make_record("none", 1, 0.1), step_s=None)
    assert outcome_text(record) == "done, but no step was timed: all were warm-up"
    assert outcome_text(replace(record, status="oom", error="no memory")) == "oom: no memory"


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    arguments = [*GRID, f"runs_dir={tmp_path}", "dry_run=true", "device=cuda"]
    out = said(sweep.main, *arguments)
    assert out.startswith("study=s: the grid of this command\nstrategy  ranks")
    assert f"would run 4 of 4 cells: {dry_run.UNKNOWN}" in out
    assert list(tmp_path.iterdir()) == []
