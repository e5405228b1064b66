"""Files that others may have written: data is data, and settings read nothing of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from lab.settings.config import ConfigError, build, load

PROFILE = """
name: mine
source: '{source}'
reference_batch: 512
layers:
  - {{name: conv1, parameters: 100, forward_ms: 1.0, backward_ms: 2.0}}
"""


def profile(tmp_path: Path, header: str = "", source: str = "x") -> str:
    path = tmp_path / "profile.yaml"
    path.write_text(header + PROFILE.format(source=source))
    return f"profile={path}"


def test_a_profile_is_what_its_file_says(tmp_path: Path) -> None:
    header = "# @package _global_\n"  # of Hydra's files; here a comment
    config = load(["model=replay", profile(tmp_path, header), "profile.reference_batch=7"])
    read = OmegaConf.to_container(config, resolve=True)
    assert isinstance(read, dict)
    assert read["profile"]["reference_batch"] == 7
    assert read["model"]["profile"] == read["profile"]
    assert read["profile"]["layers"] == [
        {"name": "conv1", "parameters": 100, "forward_ms": 1.0, "backward_ms": 2.0}
    ]


@pytest.mark.parametrize("text", ["${oc.env:SECRET}", "a${seed}b", r"\${seed}", r"\\${x}\ "])
def test_an_interpolation_in_a_profile_is_text(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    config = load([profile(tmp_path, source=text)])
    assert OmegaConf.to_container(config, resolve=True)["profile"]["source"] == text  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    "line",
    [
        "_target_: os.system",
        "source: {_target_: os.system, _args_: [touch PWNED]}",
        "layers: [{name: {_target_: os.system}}]",
    ],
)
def test_a_profile_that_names_code_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(f"name: mine\n{line}\n")
    with pytest.raises(ConfigError, match="_target_: keys that begin with _ are not allowed"):
        load(["model=replay", f"profile={path}"])


def test_a_profile_in_a_folder_of_choices_is_data_too(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/theirs.yaml").write_text("name: {_target_: os.system}\n")
    with pytest.raises(ConfigError, match="profile=theirs: _target_: keys that begin with _"):
        load([f"config_dir={tmp_path}", "profile=theirs"])


@pytest.mark.parametrize("group", ["model", "optim", "sync", "exchange"])
def test_a_choice_of_what_every_run_builds_says_what_to_build(tmp_path: Path, group: str) -> None:
    (tmp_path / "mine.yaml").write_text("lr: 1\n")
    with pytest.raises(ConfigError, match=f"^{group}._target_: is missing$"):
        load([f"{group}={tmp_path / 'mine.yaml'}"])


def test_a_file_sets_its_own_group_alone(tmp_path: Path) -> None:
    path = tmp_path / "link.yaml"
    path.write_text("# @package _global_\nmodel:\n  _target_: os.system\n")
    with pytest.raises(ConfigError, match="@package: only the file of a strategy may set"):
        load([f"cluster={path}"])


@pytest.mark.parametrize(
    "text", ["${oc.env:SECRET}", "${oc.${seed}:SECRET}", "${hydra:runtime.cwd}"]
)
def test_a_file_of_settings_reads_nothing_of_the_machine(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    path = tmp_path / "link.yaml"
    path.write_text(f"rate: '{text}'\n")
    with pytest.raises(ConfigError, match="a file may refer only to other settings") as refused:
        load([f"cluster={path}"])
    assert "hunter2" not in str(refused.value)


def test_the_command_line_may_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUDY", "mine")
    config = load(["+model.note='${oc.env:STUDY}'"])
    assert config.model.note == "mine"


@pytest.mark.parametrize(
    ("group", "path"),
    [
        ("cluster", "lab.measure.environment._output"),
        ("cluster", "os.system"),
        ("exchange", "lab.study.launch.run"),
        ("model", "lab.model._private"),
        ("straggler", "lab.cluster.settings.emulated"),
    ],
)
def test_a_file_names_only_choices_of_its_group(group: str, path: str, tmp_path: Path) -> None:
    file = tmp_path / "choice.yaml"
    file.write_text(f"_target_: {path}\n_args_: [touch, PWNED]\n")
    with pytest.raises(ConfigError, match=f"{group}._target_={path}: not allowed for {group}"):
        load([f"{group}={file}"])


def test_code_that_a_file_names_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "choice.yaml"
    file.write_text("_target_: torch.nn.Identity\n")
    load([f"model={file}"])
    load([f"model={file}"])
    said = capsys.readouterr().err
    assert said.count("lab: a file sets model, which imports torch.nn.Identity from ") == 1
    load(["model=torch.nn.Identity"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [
        "codec=topk codec.ratio=7",
        "path=hierarchical codec.block_size=1",
        "memory.keeps=7",
        "path=hierarchical path.inter=nope",
        "exchange=auto exchange.candidates.topk.ratio=7",
        "exchange=schedule exchange.second.error_feedback=7",
        "exchange=topk exchange.error_feedback=7",
    ],
)
def test_a_wrong_part_of_an_exchange_is_named_as_it_was_written(words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words.split()[-1]}: "):
        exchange = load(words.split()).exchange
        # Apart from all other settings, as a count of its costs takes it.
        build(cast(Any, OmegaConf.create(OmegaConf.to_container(exchange, resolve=True))))
