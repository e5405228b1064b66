"""Hydra's habits: each row of the table in docs/how-to/hydra.md does what the page says."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

import lab
from tests.conftest import ROOT
from tests.support import HANG_S

PAGE = (ROOT / "docs/how-to/hydra.md").read_text()
ROWS = re.findall(r"^\| `(.+?)` \| (works|use|wrong) \| `(.+?)` \|$", PAGE, re.MULTILINE)
PROGRAM = ROOT / "examples/hydra/train.py"
PLUGINS = {"optuna": "hydra_optuna_sweeper", "joblib": "hydra_joblib_launcher"}
Answer = tuple[int, str, str]  # exit code, output, errors


def needed(line: str) -> str | None:
    """Return the module of the plugin that a line names."""
    found = re.search(r"hydra/(?:launcher|sweeper)=(\w+)", line)
    return f"hydra_plugins.{PLUGINS[found[1]]}" if found else None


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of hydra_plugins itself
        return False


def marks(line: str) -> list[pytest.MarkDecorator]:
    """Return what a row of the table needs: rows of a program that trains are slow."""
    if not line.startswith("python "):
        return []
    plugin = needed(line)
    lacks = plugin is not None and not is_there(plugin)
    skip = pytest.mark.skipif(lacks, reason=f"{plugin} is not installed")
    return [skip, *([pytest.mark.slow] if "steps=" in line else [])]


@pytest.mark.parametrize(
    ("line", "kind", "printed"), [pytest.param(*row, marks=marks(row[0])) for row in ROWS]
)
def test_each_row_of_the_table_is_true(
    line: str,
    kind: str,
    printed: str,
    tmp_path: Path,
    real_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] == "python":
        shutil.copy(PROGRAM, tmp_path)
        done = subprocess.run([sys.executable, *words[1:]], env=real_environment, timeout=HANG_S)
        code = done.returncode
    else:
        code = importlib.import_module(f"lab.{words[1]}").main(words[2:])
    out, err = capfd.readouterr()
    assert code == {"works": 0, "wrong": 1, "use": 2}[kind], err
    assert printed in (err if kind == "use" else out + err)
    assert kind == "works" or "Traceback" not in err
    if kind == "use":
        assert err.count("\n") == 1 and any(f": error: {word}" in err for word in words[2:])


def test_the_table_has_what_hydras_users_know() -> None:
    text = " ".join(line for line, _, _ in ROWS)
    known = (
        *("--info", "--resolve", "--package", "--version", "--hydra-help", "-cn", "-cp"),
        *("-sc install=bash", "range(", "interval(", "glob(*)", "hydra.run.dir=", "searchpath"),
        *("hydra/launcher=joblib", "hydra/sweeper=optuna", "${oc.env:LR,0.1}", "python train.py"),
    )
    assert not [each for each in known if each not in text]


def test_bash_completes_settings_and_choices(real_environment: dict[str, str]) -> None:
    asked = ("lab tra", "lab train strategy=ring,oneb", "lab train strategy=onebit exchange.thr")
    ask = """eval "$(lab -sc install=bash)"
        for COMP_LINE in "$@"; do COMP_POINT=${#COMP_LINE}; _lab; echo "${COMPREPLY[*]}"; done"""
    command = f'lab() {{ "{sys.executable}" -m lab "$@"; }}\n{ask}'
    run = {"capture_output": True, "text": True, "env": real_environment, "timeout": HANG_S}
    done = subprocess.run(["bash", "-c", command, "bash", *asked], **run)
    command_name, choices, key = done.stdout.splitlines()
    assert command_name == "train" and key == "exchange.threshold="
    assert choices.split() == [f"ring,{name}" for name in ("onebit", "onebit_adam", "onebit_lamb")]


@pytest.mark.slow
def test_a_program_of_ones_own_trains_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with initialize_config_module("lab.conf", version_base="1.3"):
        config = compose("train", ["strategy=onebit", "steps=4", "study=mine", "device=cpu"])
    with pytest.raises(
        lab.ConfigError, match="batch_size=128: must be a multiple of 3 for 3 ranks"
    ):
        lab.run(config, world_size=3)
    config.optim.lr = -1
    with pytest.raises(lab.ConfigError, match="optim.lr=-1: must be a number of at least 0"):
        lab.run(config)
    config.optim.lr, config.runs_dir = 0.01, "taken"
    Path("taken").touch()
    with pytest.raises(RuntimeError, match="did not begin"):
        lab.run(config)
    config.runs_dir = "runs"
    record = lab.run(config, world_size=2)
    assert (record.status, record.world_size, record.study) == ("done", 2, "mine")
    assert (tmp_path / "runs/mine" / record.cell / "record.json").is_file()
