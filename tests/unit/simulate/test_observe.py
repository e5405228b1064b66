"""Measurements of strangers: nothing that their settings name is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.score import main as score
from tests.support.records import leave, make_record

SETTINGS = """\
strategy: allreduce
cluster: {_target_: os.mkdir, path: ran}
exchange: {_target_: os.mkdir}
sync: {_target_: os.mkdir}
overlap: false
"""


def test_a_study_of_a_stranger_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for size in (1, 2):
        cell = tmp_path / "stranger" / f"n{size}"
        leave(
            cell,
            make_record("allreduce", size, 0.1, environment={"hostname": "h", "cpu": "\x1b[2J"}),
        )
        (cell / "config.yaml").write_text(SETTINGS)
    assert score(["stranger"]) == 2
    assert not (tmp_path / "ran").exists()
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "\x1b" not in said.out + said.err
