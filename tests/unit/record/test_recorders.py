"""Recorders: what they write is read back by the readers of its users; failures are warnings."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from lab.record.recorders import (
    CURVES,
    CsvRecorder,
    Guarded,
    MlflowRecorder,
    Recorder,
    TensorBoardRecorder,
    WandbRecorder,
)
from lab.record.schema import Record
from lab.settings.config import ConfigError, build, load
from tests.support.records import make_record
from tests.support.wandb_file import curves, only, settled

LOGGED: list[tuple[int, dict[str, float]]] = [
    (1, {"train/loss": 2.5, "train/lr": 0.1}),
    (2, {"train/loss": 1.25, "train/lr": 0.05}),
    (2, {"test/accuracy": 0.75}),
    (3, {"train/loss": math.nan, "train/lr": 0.0}),
]


def use(recorder: Recorder, folder: Path, first_step: int = 0) -> None:
    """Record LOGGED, after `first_step` steps that another start of the run has done."""
    folder.mkdir(exist_ok=True)
    recorder.start(folder, "study", {"strategy": "none"}, first_step)
    for step, values in LOGGED:
        recorder.log(first_step + step, values)
    recorder.finish(make_record("none", 1, 1.0))


def test_csv_has_a_row_per_step_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    use(CsvRecorder(), tmp_path)
    use(CsvRecorder(), tmp_path, first_step=2)
    table = pd.read_csv(tmp_path / CURVES)
    assert list(table) == ["step", "train/loss", "train/lr", "test/accuracy"]
    assert table["train/lr"].tolist() == [0.1, 0.05, 0.1, 0.05, 0.0]
    assert table["test/accuracy"].dropna().to_dict() == {1: 0.75, 3: 0.75}
    assert table["step"].tolist() == [1, 2, 3, 4, 5]  # the first start's step 3 does not count
    assert table["train/loss"].tolist()[:4] == [2.5, 1.25, 2.5, 1.25]
    use(CsvRecorder(), tmp_path)
    assert pd.read_csv(tmp_path / CURVES)["step"].tolist() == [1, 2, 3]


def test_tensorboard_reads_its_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    use(TensorBoardRecorder(), tmp_path)
    use(TensorBoardRecorder(), tmp_path, first_step=2)
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert set(shown.Tags()["scalars"]) == {"train/loss", "train/lr", "test/accuracy"}
    learning = {event.step: event.value for event in shown.Scalars("train/lr")}
    assert learning == pytest.approx({1: 0.1, 2: 0.05, 3: 0.1, 4: 0.05, 5: 0.0})
    assert [event.step for event in shown.Scalars("train/lr")] == [1, 2, 3, 4, 5]
    assert [(e.step, e.value) for e in shown.Scalars("test/accuracy")] == [(2, 0.75), (4, 0.75)]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a cell that wandb recorded offline."""
    folder = tmp_path_factory.mktemp("wandb") / "cell"
    folder.mkdir()
    (folder / "record.json").write_text("{}")
    (folder / "output.log").write_text("of a rank, which may print a secret")
    use(WandbRecorder("lab", "offline", tags=["a", "b"]), folder)
    return folder


def test_an_offline_run_of_wandb_holds_curves_settings_summary_and_files(offline: Path) -> None:
    (start,) = settled(offline)
    found = curves(next(offline.rglob("*.wandb")))
    assert found["train/lr"] == {1: 0.1, 2: 0.05, 3: 0.0}
    assert found["test/accuracy"] == {2: 0.75}
    assert {s: v for s, v in found["train/loss"].items() if s < 3} == {1: 2.5, 2: 1.25}
    assert math.isnan(found["train/loss"][3])
    run = only(start, "run")[0]
    assert (run.project, run.run_group, run.display_name) == ("lab", "study", "cell")
    assert (run.job_type, [*run.tags]) == ("train", ["a", "b"])
    assert {each.key: each.value_json for each in run.config.update}["strategy"] == '"none"'
    summary = {item.key: item.value_json for each in only(start, "summary") for item in each.update}
    assert (summary["status"], summary["world_size"]) == ('"done"', "1")
    ((entry,),) = (artifact.manifest.contents for artifact in only(start, "artifact"))
    assert entry.path == "record.json"
    assert Path(entry.local_path).is_relative_to(offline)  # so `wandb sync` finds it on any host


def test_an_interrupted_run_of_wandb_stays_one(offline: Path, tmp_path: Path) -> None:
    use(WandbRecorder(), tmp_path)
    settled(tmp_path)
    use(WandbRecorder(), tmp_path, first_step=2)
    first, second = (only(start, "run")[0] for start in settled(tmp_path, 2))
    assert first.run_id == second.run_id != ""
    (other,) = settled(offline)
    assert only(other, "run")[0].run_id != first.run_id


@pytest.mark.parametrize(
    ("environment", "settings", "expected"),
    [
        ({}, {}, ("scaling-lab", None, "offline")),
        ({"WANDB_PROJECT": "p", "WANDB_ENTITY": "e"}, {}, ("p", "e", "offline")),
        (
            {"WANDB_PROJECT": "p", "WANDB_ENTITY": "e", "WANDB_MODE": "online"},
            {"project": "mine", "entity": "me", "mode": "offline"},
            ("mine", "me", "offline"),
        ),
        ({"WANDB_MODE": "disabled"}, {}, ("scaling-lab", None, "disabled")),
    ],
)
def test_wandb_is_what_its_environment_says_where_no_setting_does(
    environment: dict[str, str],
    settings: dict[str, str],
    expected: tuple[str | None, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = ["recorder=wandb", *(f"recorder.{key}={value}" for key, value in settings.items())]
    recorder, given = build(load(words).recorder), dict[str, Any]()
    if expected[2] == "disabled":
        use(recorder, tmp_path)
        assert not [*tmp_path.rglob("*.wandb")]
    monkeypatch.setattr(
        "wandb.init", lambda **about: given.update(about) or SimpleNamespace(disabled=True)
    )
    recorder.start(tmp_path, "study", {}, 0)
    assert (given["project"], given["entity"], given["mode"]) == expected


def test_mlflow_has_a_run_for_a_cell_and_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed here")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # else it wants a database
    store, folder = str(tmp_path / "store"), tmp_path / "cell"
    folder.mkdir()
    (folder / "record.json").write_text("{}")
    (folder / "output.log").write_text("of a rank, which may print a secret")
    use(MlflowRecorder(store), folder)
    use(MlflowRecorder(store), folder, first_step=2)
    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("study")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("cell", "FINISHED")
    assert run.data.params == {"strategy": "none"}
    rates = client.get_metric_history(run.info.run_id, "train/lr")
    assert [(each.step, each.value) for each in rates] == [
        *((1, 0.1), (2, 0.05), (3, 0.0)),
        *((3, 0.1), (4, 0.05), (5, 0.0)),
    ]
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["record.json"]


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "mlflow"])
def test_a_missing_package_is_named_before_training(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as error:
        build(load([f"recorder={name}"]).recorder)
    assert str(error.value) == f"recorder={name}: needs the package {name}; run pip install {name}"


class Broken:
    """A recorder whose calls fail from `log` on."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        self.calls.append("start")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append("log")
        raise ConnectionError("no network\nand more")

    def finish(self, record: Record) -> None:
        self.calls.append("finish")


def test_a_failure_is_one_warning_and_turns_the_recorder_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Broken()
    guarded = Guarded(broken)
    assert guarded.works
    use(guarded, tmp_path)
    assert not guarded.works
    assert broken.calls == ["start", "log"]
    assert capsys.readouterr().err == "lab.train: Broken is switched off: no network\n"


def test_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "never")
    with pytest.raises(ValueError, match=r"WANDB_MODE=never: allowed: offline, online, shared"):
        WandbRecorder("lab")
    with pytest.raises(ValueError, match=r"recorder.mode=sometimes: allowed: offline, online"):
        WandbRecorder("lab", "sometimes")
