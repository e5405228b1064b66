"""Runs in turns: each trains as it would alone, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.training import in_turns
from tests.support.ranks import CREW, train

RUN = (
    *("device=cpu", "model=alexnet_small", "model.dropout=0.5", "data=synthetic", "batch_size=4"),
    *("data.num_images=64", "warmup_steps=1"),
)


def settings(folder: Path, cell: str, strategy: str, *more: str) -> list[str]:
    return [*RUN, f"strategy={strategy}", f"runs_dir={folder}", f"cell={cell}", *more]


def record(folder: Path, cell: str) -> dict[str, Any]:
    return json.loads((folder / "default" / cell / "record.json").read_text())


def test_weights_are_those_of_a_run_alone_with_the_same_random_numbers(tmp_path: Path) -> None:
    runs = {"onebit": "steps=5", "powersgd": "steps=7"}
    lists = [settings(tmp_path, f"turns-{name}", name, steps) for name, steps in runs.items()]
    assert CREW.call(1, in_turns.main, ["2", json.dumps(lists)]) == [0]
    for name, steps in runs.items():
        (alone,) = train(1, *settings(tmp_path, f"alone-{name}", name, steps))
        together = record(tmp_path, f"turns-{name}")
        assert together["replica_hash"] == alone.record["replica_hash"]
        assert len(together["turns_s"]) == 2
        assert together["num_timed_steps"] == 2
        assert together["peak_memory_bytes"] is None
    starts = {record(tmp_path, f"turns-{name}")["started_at"] for name in runs}
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("size", "more", "line"),
    [
        ("2", ("steps=2",), "turns=2: strategy=onebit has steps=2, fewer than warm-up and a turn"),
        ("1", ("steps=8",), "turns=1: strategy=onebit exchanges every 1 steps"),
    ],
)
def test_turns_that_do_not_fit_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], size: str, more: tuple[str, ...], line: str
) -> None:
    assert in_turns.main([size, json.dumps([settings(tmp_path, "a", "onebit", *more)])]) == 2
    assert f"lab.train: error: {line}" in capfd.readouterr().err
