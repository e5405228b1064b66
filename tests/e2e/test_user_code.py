"""A bug in the user's code: its file and line, and what the run had measured before."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import Finished, record

BUGS = "tests.support.bugs"
QUICK = ("device=cpu", "batch_size=24", "data.size=16", "optim.lr=0.01", "steps=6", "cell=a")
OURS = "lab.train: error: "


@pytest.mark.parametrize(
    ("setting", "error", "place", "line"),
    [
        ("data=InDataSet", "ZeroDivisionError: ", "train_batches", "yield batch if number < 2"),
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


def test_a_run_that_fails_in_its_last_evaluation_keeps_its_steps(
    command: Callable[..., Finished], tmp_path: Path
) -> None:
    breakdown = ("measure=breakdown", "warmup_steps=2")
    done = command("lab.train", *QUICK, f"task._target_={BUGS}.InMetrics", *breakdown)
    assert done.code == 1
    run = tmp_path / "runs/default/a"
    result = record(run)
    assert result["status"] == "failed" and result["final"] == {}
    assert re.search(r"\(bugs\.py:\d+ in sums\)$", result["error"])
    assert "super().sums(outputs, targets) / (1 // ZERO)" in result["traceback"]
    assert result["num_steps"] == 6 == pq.read_table(run / "steps.parquet").num_rows
    assert result["replica_hash"] and result["payload_bytes_per_step"] == [0]
    assert result["step_s"]["median"] > 0 and result["wall_samples_per_s"] > 0
    assert (run / "timeline.json").exists()
