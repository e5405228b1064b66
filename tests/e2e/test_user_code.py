"""A bug in the user's code: its file and line, and what the run had measured before."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import Finished, record
from tests.support.ranks import told
from tests.support.slow import some_of

BUGS = "tests.support.bugs"
QUICK = ("device=cpu", "batch_size=24", "data.size=16", "optim.lr=0.01", "steps=6", "cell=a")
OURS = "lab.train: error: "


@pytest.mark.parametrize(
    ("setting", "error", "place", "line"),
    [
        ("data=InDataSet", "ZeroDivisionError: ", "train_batches", "yield batch if number < 2"),
        pytest.param(
            *("task=InLoss", "ZeroDivisionError: "),
            *("loss", "return super().loss(outputs, targets) / ("),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("optim=InUpdate", "ZeroDivisionError: ", "step", "self.lost = 1 // ZERO"),
            marks=pytest.mark.slow,
        ),
        ("model=InConstructor", "TypeError: must be real", "__init__", 'math.floor("wide")'),
        ("model=Quits", "SystemExit: 0", "__init__", "sys.exit(0)"),
    ],
)
def test_a_bug_is_shown_with_its_file_and_line(
    command: Callable[..., Finished],
    tmp_path: Path,
    setting: str,
    error: str,
    place: str,
    line: str,
) -> None:
    group, _, name = setting.partition("=")
    done = command("lab.train", *QUICK, f"{group}._target_={BUGS}.{name}")
    assert done.code == 1
    result = record(tmp_path / "runs/default/a")
    assert result["status"] == "failed"
    assert re.fullmatch(rf"rank 0: {error}.* \(bugs\.py:\d+ in {place}\)", result["error"])
    assert done.error_lines == [OURS + result["error"]]
    text = result["traceback"]
    assert text.startswith("Traceback (most recent call last):\n") and line in text
    assert "/lab/training/" not in text and error in text.splitlines()[-1]
    assert done.err.count(text) == done.err.count("Traceback") == 1


def test_one_rank_says_it_for_all(train: Callable[..., Finished], tmp_path: Path) -> None:
    done = train(2, *QUICK, f"model._target_={BUGS}.InForward")
    result = record(tmp_path / "runs/default/a")
    assert re.search(r"^rank 1: ZeroDivisionError: .*\(bugs\.py:\d+ in forward\)$", result["error"])
    assert done.error_lines == [OURS + result["error"]]
    assert f"  traceback : {OURS}{result['error']}\n" in done.err  # in torchrun's own report
    assert done.err.count("return input / (1 // ZERO)") == 1
    assert "return input / (1 // ZERO)" in result["traceback"]


@pytest.mark.parametrize(
    "more", some_of(["measure=breakdown warmup_steps=2", "eval_every=3", ""], every=3)
)
def test_a_run_that_fails_in_its_last_evaluation_keeps_its_steps(
    command: Callable[..., Finished], tmp_path: Path, more: str
) -> None:
    steps = ("steps=3",) if more == "eval_every=3" else ()
    done = command("lab.train", *QUICK, f"task._target_={BUGS}.InMetrics", *steps, *more.split())
    assert done.code == 1
    run = tmp_path / "runs/default/a"
    result = record(run)
    assert result["status"] == "failed" and result["final"] == {}
    assert re.search(r"\(bugs\.py:\d+ in sums\)$", result["error"])
    assert "super().sums(outputs, targets) / (1 // ZERO)" in result["traceback"]
    num_steps = 3 if steps else 6
    assert result["num_steps"] == num_steps == pq.read_table(run / "steps.parquet").num_rows
    assert result["replica_hash"] and result["payload_bytes_per_step"] == [0]
    if not steps:  # of three, none is timed
        assert result["step_s"]["median"] > 0 and result["wall_samples_per_s"] > 0
    assert (run / "timeline.json").exists() == ("measure=breakdown" in more)


def lab_train(folder: Path, environment: dict[str, str], *settings: str) -> Finished:
    """Run lab.train in an interpreter of its own, which finds modules in `folder`."""
    line = [sys.executable, "-m", "lab.train", *QUICK, *settings]
    environment = {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}:{folder}"}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    return Finished(done.returncode, done.stdout, done.stderr)


def test_an_import_error_shows_its_cause(tmp_path: Path, real_environment: dict[str, str]) -> None:
    (tmp_path / "mynets.py").write_text("import torch\nimport nowhere_to_be_found\n")
    done = lab_train(tmp_path, real_environment, "model._target_=mynets.Net")
    error = "mynets.py:2 in <module>: ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    assert done.error_lines == [f"{OURS}model=mynets.Net: cannot be imported: {error}"]
    assert done.code == 2 and not list(tmp_path.glob("runs/*/*"))


def test_settings_of_a_users_code_that_do_not_exist_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {
        (f"model._target_={BUGS}.Nett",): f"{BUGS} has no Nett; did you mean Net?",
        ("model._target_=nowhere.Net",): "model=nowhere.Net: no module nowhere in",
        (f"model._target_={BUGS}.Net", "+model.width=3"): (
            "model.width: no such argument; allowed: none"
        ),
    }
    lines = told(*((*QUICK, *settings) for settings in wrong))
    for message, line in zip(wrong.values(), lines, strict=True):
        assert message in line and "\n" not in line
