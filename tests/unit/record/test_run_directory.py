"""Ownership of run directories: each belongs to one run at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lab.distributed.launcher import launch_id
from lab.record import run_directory
from lab.record.run_directory import RunDirectory
from tests.support.records import make_record


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "LOCK_WAIT_S", 0.0)


def claim(parent: Path, cell: str | None = "a", **options: Any) -> RunDirectory:
    return RunDirectory.acquire(parent, cell, "name", options.pop("resume", None), **options)


def take(parent: Path, **options: Any) -> RunDirectory:
    """Claim a directory, and release it."""
    run = claim(parent, **options)
    run.release()
    return run


def begin(parent: Path, launch: str | None = None, **options: Any) -> RunDirectory:
    run = claim(parent, launch=launch, **options)
    started = {"first_step": 0, "world_size": 2, "started_at": "2026-01-01T00:00:00+00:00"}
    run.begin_attempt({**started, "launch": launch})
    return run


def test_two_runs_at_once_do_not_share_a_directory(tmp_path: Path) -> None:
    first = begin(tmp_path)
    for resume in (None, "auto"):
        with pytest.raises(ValueError, match=r"another run is still writing .*/a"):
            claim(tmp_path, resume=resume)
    first.release()
    assert take(tmp_path, resume="auto").path == tmp_path / "a"


def test_a_lock_that_is_a_link_changes_no_file_and_a_pipe_holds_nothing_up(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    for cell in ("link", "pipe"):
        (tmp_path / cell).mkdir()
    (tmp_path / "link/.lock").symlink_to(precious)
    os.mkfifo(tmp_path / "pipe/.lock")
    with pytest.raises(ValueError, match="runs_dir: cannot write .*/link"):
        claim(tmp_path, "link")
    assert precious.read_text() == "kept"
    claim(tmp_path, "pipe").release()


def test_a_killed_run_is_continued_or_left_alone(tmp_path: Path) -> None:
    begin(tmp_path).release()
    with pytest.raises(ValueError, match=r"cell=a: .* that was killed; .* or resume=auto"):
        claim(tmp_path)
    assert take(tmp_path, resume="auto").attempts()


def test_a_job_finds_its_own_run_and_no_other(tmp_path: Path) -> None:
    first = begin(tmp_path, cell=None, launch="7 steps=6")
    first.release()
    assert take(tmp_path, cell=None, launch="7 steps=6").path == first.path
    assert take(tmp_path, cell=None, launch="8 steps=6").path != first.path
    assert take(tmp_path, cell=None).path != first.path


def test_a_job_that_is_done_is_found_so(tmp_path: Path) -> None:
    run = begin(tmp_path, launch="7 steps=6")
    run.write_record(make_record("none", 1, 1.0))
    run.release()
    assert take(tmp_path, launch="7 steps=6").status() == "done"
    with pytest.raises(ValueError, match=r"cell=a: .* already contains a record \(done\)"):
        claim(tmp_path)


def test_a_broken_neighbour_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "attempts.json").touch()
    assert take(tmp_path, launch="7").path == tmp_path / "a"


def test_what_did_not_begin_leaves_nothing(tmp_path: Path) -> None:
    take(tmp_path).discard_if_empty()
    assert list(tmp_path.iterdir()) == []
    take(tmp_path / "runs/study").discard_if_empty()
    assert list(tmp_path.iterdir()) == []


def test_a_job_is_what_its_launcher_names_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAB_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert launch_id(["a=b"]) is None
    monkeypatch.setenv("SLURM_JOB_ID", "12")  # many commands may share an allocation
    assert launch_id(["a=b"]) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launch_id(["a=b"]) is None
    monkeypatch.setenv("LAB_JOB", "slurm-12")
    assert launch_id(["a=b"]) == "slurm-12 a=b"
