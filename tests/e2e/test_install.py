"""Commands as users type them; tests/e2e/test_images.py installs the wheel."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.settings.config import choices_of
from tests.conftest import ROOT, Finished, record
from tests.support.ranks import train

COMMAND_FILES = sorted(path.stem for path in (ROOT / "lab").glob("*.py") if path.stem != "__init__")
COMMANDS = (*(f"lab.{command}" for command in COMMAND_FILES), "lab.cluster")
OF_RUNS = ("lab.train", "lab.sweep", "lab.bench", "lab.predict", "lab.profile_layers")


@pytest.mark.parametrize("module", COMMANDS)
def test_help_names_settings_and_examples(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module("lab.cluster.__main__" if module == "lab.cluster" else module)
    module = module.removesuffix(".__main__")
    assert command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m {module} ")
    assert shown[shown.index("examples:") :].count(f"-m {module}") >= 2
    if module in OF_RUNS:
        assert all(name in shown for name in choices_of("strategy"))
        assert "exchange_timeout_s=300.0" in shown and "--config-dir DIR" in shown


def test_plain_python_is_one_rank_as_of_a_launcher(
    command: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("strategy=onebit", "batch_size=24", "data.size=16", "steps=6")
    assert command("lab.train", *settings, "device=cpu", "cell=a").code == 0
    plain, launched = record(tmp_path / "runs/default/a"), train(1, *settings)[0].record
    assert plain["world_size"] == launched["world_size"] == 1
    assert plain["replica_hash"] == launched["replica_hash"]


@pytest.mark.slow
def test_compiled_model_trains(command: Callable[..., Finished], tmp_path: Path) -> None:
    settings = ("model=mlp", "batch_size=24", "steps=6", "device=cpu", "strategy=overlap")
    for cell, switch in (("a", "compile=true"), ("b", "compile=false")):
        assert command("lab.train", *settings, switch, f"cell={cell}").code == 0
    compiled, eager = (record(tmp_path / "runs/default" / cell) for cell in "ab")
    assert (compiled["compile"], eager["compile"]) == ("regions", None)
    assert compiled["final"]["loss"] == pytest.approx(eager["final"]["loss"], rel=1e-3)
