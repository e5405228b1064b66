"""What no command can use, as people who knew the documents alone wrote it: one line for each.

What they tried that needs processes of its own is in outsiders.sh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from lab import advise, calibrate, plot, predict, report, score, sweep, train
from lab.cluster import __main__ as cluster
from lab.data.arrays import arrays
from lab.settings.config import load
from lab.settings.names import run_name
from lab.settings.secrets import without_secrets
from lab.study import grid
from tests.support import refusing
from tests.support.commands import refusal
from tests.support.ranks import told

LARGE = "99999999999999999999"
# A setting, the values that it cannot have, and what is said of each.
VALUES = [
    ("steps", f"0 -1 1.5 nan {LARGE}", "must be an integer"),
    ("batch_size", "0 24.5 nan 9223372036854775808", "must be an integer"),
    ("seed", "-1 0.5 nan 18446744073709551616 abc", "must be an integer"),
    ("repeat", f"-1 1.5 true {LARGE}", "must be an integer"),
    *((f"{of}_every", "-1", "must be an integer") for of in ("eval", "checkpoint", "drift")),
    *((name, "-1", "must be an integer") for name in ("warmup_steps", "threads")),
    ("bucket_mb", "nan inf -1 true", "must be a number"),
    ("exchange_timeout_s", "0 nan inf 1e20 1h", "must be a number"),
    ("clip_grad_norm", "0 -1 nan inf true", "must be a number"),
    ("overlap", "t tru maybe", "must be true or false"),
    *((name, value, "allowed: ") for name, value in (("precision", "FP32"), ("device", "mps"))),
    *((name, value, "allowed: ") for name, value in (("scaling", "STRONG"), ("backend", "mpi"))),
    ("recorder", "none", "allowed: "),
    ("strategy", "Onebit", "did you mean onebit?"),
]


@pytest.mark.parametrize(("name", "values", "said"), VALUES)
def test_values_that_a_setting_cannot_have(name: str, values: str, said: str) -> None:
    for value in values.split():
        with refusing(f"{name}={value}: {said}"):
            load([f"{name}={value}"])


NO_SETTING = "is not a setting: write key=value"
NO_NAME = "must be able to name a directory"
WORDS = [
    *(("cell='..'", NO_NAME), ("cell=' '", NO_NAME), ("cell='$(touch x)'", NO_NAME)),
    *(("cell=../x", NO_NAME), ("cell=a/../../x", NO_NAME), ("study=/tmp/x", NO_NAME)),
    *(
        (f"cell={'x' * 256}", NO_NAME),
        ("cell='*'", NO_NAME),
        ("cell=study.json", NO_NAME),
        ("cell=report.html", NO_NAME),
    ),
    *((f"cell={'é' * 128}", NO_SETTING), ("cell=\udcff\udcfe", "udcff\\udcfe' is not a setting")),
    *(("runs_dir=~", NO_SETTING), ("runs_dir=''", "runs_dir=: must not be empty")),
    *(("strategy", NO_SETTING), ('cell="abc', NO_SETTING), ("cell=[a", NO_SETTING)),
    *(("cell=${", NO_SETTING), ("optim..lr=1", NO_SETTING), ("b\u0430tch_size=24", NO_SETTING)),
    *(("seed=\u22121", NO_SETTING), ("batch_size=24\u200b", "u200b"), ("cell=a\u202eb", "u202e")),
    *(("+foo=1", "nothing reads this setting"), ("~strategy", "a run needs this setting")),
    ("+hydra.x=1", "Hydra itself has no settings here"),
    ("batch_size=${batch_size}", "Recursive interpolation"),
    *(("cell=${nope}", "'nope' not found"), ("cell=${oc.env:NOPE}", "'NOPE' not found")),
    ("steps=6 epochs=2", "steps=6 epochs=2.0: set only one of the two"),
    ("batch_size=24 batch_size=nan", "batch_size=nan: must be an integer"),
]


@pytest.mark.parametrize(("words", "said"), WORDS)
def test_words_that_are_no_settings(words: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        load([words] if words.startswith("cell=") else words.split())
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_names_of_runs_stay_short_and_texts() -> None:
    widths = ",".join(map(str, range(1, 60)))
    assert len(run_name([f"model.hidden=[{widths}]"], "none", 1)) < 200
    assert load(["cell='007'"]).cell == "007"
    assert load(["deterministic=no"]).deterministic is False


def test_a_line_about_a_wrong_setting_shows_no_secret() -> None:
    token = "ghp_0123456789abcdefghijklmnopqrstuvwxyzAB"
    words = (f"optim.lr={token}", f"{token}=1", f"model=m.{token}", f"--config-dir=/x/{token}")
    for word in (*words, "batch_size=https://u:pwpw77@h"):
        line = refusal(train.main, word, "--cfg", "job")
        assert token not in line and "pwpw77" not in line
    assert without_secrets("glpat-abcdefghij0123456789") == "…"


GRIDS = [
    *((f"overlap={two}", "listed twice") for two in ("true,True", "false,False")),
    *(("optim.lr=0.01,1e-2", "listed twice"), ("model.hidden=[8],[ 8 ]", "listed twice")),
    *((f"world_size={n}", f"world_size={n.split(',')[0]}") for n in ("0", "nan", "true", "1,1")),
    *((f"retry={word}", f"retry={word}: allowed: none, failed") for word in ("Failed", "all")),
    *((f"turns={n}", f"turns={n}: must be") for n in ("0", "-1", "1.5")),
    ("seed=1:steps=7", "no cell has seed=1"),
    ("study=a:b", NO_NAME),
    ("+model.api_token=tokAAAA,tokBBBB", "only in secrets"),
]


@pytest.mark.parametrize(("word", "said"), GRIDS)
def test_grids_that_no_sweep_can_run(
    word: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal(sweep.main, "study=s", "strategy=none,onebit", word, "dry_run=true")
    assert said in line and "tokAAAA" not in line
    assert not any(tmp_path.iterdir())


def test_values_that_almost_equal_are_two_cells() -> None:
    assert len(grid.read(["strategy=onebit", "optim.lr=0.01,0.010000001"]).cells) == 2


LINES = [
    (plot, ("-s",), "the flags are"),
    (plot, ("runs/s", "strategy==onebit"), "strategy==onebit: no such setting; allowed: out"),
    (train, ("cluster.hosts=2",), "cluster.hosts=2: needs cluster=emulated"),
    (train, ("~exchange.nope",), "~exchange.nope: Could not delete from config"),
    (train, ("--cfg=hydra",), "--cfg hydra: use --cfg job"),
    (sweep, ("batch_size=100", "world_size=1,3"), "such as 99 or 102"),
    (sweep, ("world_size=2", "device=cuda"), "world_size=2: device=cuda: torch sees no GPU"),
    (sweep, ("cell=mine",), "cell=mine is set by the sweep itself"),
    (sweep, ("study=../../x",), NO_NAME),
    (predict, ("strategy=tree", "world_size=0"), "world_size=0"),
    (advise, ("world_size=0",), "world_size=0"),
    (calibrate, ("minutes=0",), "minutes=0: must be a number above 0"),
    (calibrate, ("world_size=1",), "world_size=1: a single rank exchanges nothing; must be at"),
    (calibrate, ("out=mine.json",), "out=mine.json: must name FILE.yaml"),
    (calibrate, ("batch_size=8",), "batch_size=8 is not used by calibrate; allowed: minutes, w"),
    (cluster, ("run", "--"), "after --"),
    *((each, ("empty",), "contains no <cell>/record.json") for each in (report, score)),
]


@pytest.mark.parametrize(("command", "words", "said"), LINES)
def test_lines_that_no_command_can_use(
    command: Any, words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert said in refusal(command.main, *words)
    assert [*tmp_path.rglob("*")] == [tmp_path / "empty"]


ROWS, LABELS = np.random.default_rng(0).random((100, 4)), np.arange(100) % 2


@pytest.mark.parametrize("inputs", [ROWS.astype(">f4"), np.asfortranarray(ROWS)])
def test_arrays_may_have_another_order(inputs: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", inputs=inputs, targets=LABELS + 1)
    found = arrays(seed=0, device=torch.device("cpu"), path=str(tmp_path / "d.npz"))
    assert (found.num_train, found.num_classes) == (90, 3)


@pytest.mark.parametrize("columns", [["a", "a"], ["a", "y"]])
def test_a_column_is_an_input_once_and_no_target(columns: list[str], tmp_path: Path) -> None:
    pd.DataFrame({"a": ROWS[:, 0], "y": LABELS}).to_parquet(tmp_path / "t.parquet")
    where = {"path": str(tmp_path / "t.parquet"), "inputs": columns, "targets": "y"}
    with pytest.raises(ValueError, match="named twice, or is also the target"):
        arrays(seed=0, device=torch.device("cpu"), **where)


class Gives(nn.Linear):
    """A model whose outputs are no tensor."""

    def __init__(self, *, input_shape: tuple[int, ...], output_size: int, kind: str) -> None:
        super().__init__(256, output_size)
        self.kind = kind

    def forward(self, input: Tensor) -> Any:
        outputs = super().forward(input.flatten(1))
        return {"none": None, "tuple": (outputs,), "dict": {1: outputs}}[self.kind]


def test_outputs_that_are_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = ("none", "tuple", "dict")
    model = ("data.size=16", f"model={__name__}.Gives")
    lines = told(*((*model, f"model.kind={kind}") for kind in kinds))
    assert all("it must return a tensor" in line and "\n" not in line for line in lines)
