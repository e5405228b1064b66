"""A recorder that fails is a warning, never the end of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.record.wandb import WandbRecorder
from tests.support.records import make_record


def use(recorder: WandbRecorder, folder: Path) -> None:
    recorder.start(folder, "study", {"strategy": "none"})
    recorder.log(1, {"loss": 1.0})
    recorder.finish(make_record("none", 1, 1.0))


def test_missing_wandb_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    use(WandbRecorder("lab", "offline"), tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("lab.train: recorder=wandb is off: ")


def test_failing_wandb_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Run:
        summary: dict[str, object] = {}

        def log(self, *_: object, **__: object) -> None:
            raise ConnectionError("no network\nand more")

    class Wandb:
        Settings = dict

        @staticmethod
        def init(**_: object) -> Run:
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    use(WandbRecorder("lab", "online"), tmp_path)
    assert capsys.readouterr().err == "lab.train: recorder=wandb is off: no network\n"


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recorder.mode=sometimes: allowed are offline, online"):
        WandbRecorder("lab", "sometimes")
