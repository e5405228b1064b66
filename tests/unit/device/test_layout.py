"""lab.bench layout, from command to figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import bench
from lab.convolution.problem import Pass
from lab.device.formats import Moves, Reorder
from lab.device.layout import NUM_LOGGED, Operation, Times, sums
from tests.unit.device.test_charts import chart_in

LAYOUTS = ["NCHW", "NHWC", "blocked"]


def test_layers_and_steps_take_turns_in_all_layouts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lenet.json"
    words = ["model=lenet", "batch_size=2", "threads=1", "rounds=6", f"out={out}"]
    assert bench.main(["layout", *words]) == 0
    result = json.loads(out.read_text())
    rows = result["rows"]
    assert [row["layout"] for row in rows] == LAYOUTS * 2 * len(Pass)
    assert {row["shape"] for row in rows} == {"1x32x32 -> 20, 5x5", "20x14x14 -> 50, 5x5"}
    unneeded = {(row["layer"], row["pass"]) for row in rows if not row["is_needed"]}
    assert unneeded == {("features.0", "backward data")}
    for row in (*rows, *result["steps"]):
        assert 0 < row["time_s"]["low"] <= row["time_s"]["median"] <= row["time_s"]["high"]
        assert (row["reorder_s"] > 0) == bool(row["reorders"])
    assert all(row["ran"] for row in rows)
    plain, last, mixed = result["steps"]
    assert [each["layout"] for each in result["steps"]] == ["NCHW", "NHWC", "mixed"]
    assert plain["ratio"]["median"] == 1 and mixed["ratio"]["low"] is not None
    # Its convolutions are those of NHWC; into and out of each, and back, it copies.
    assert mixed["reorders"] == last["reorders"] and mixed["num_copies"] > last["num_copies"]
    *layers, whole = result["sums"]
    assert [each["layer"] for each in layers] == ["features.0", "features.2"]
    assert whole["layouts"][0]["reorders"] == plain["reorders"]
    text = capfd.readouterr()
    assert "[2/2] features.2: 20x14x14 -> 50, 5x5" in text.out and "mixed: conv" in text.out
    assert "onednn_verbose" not in text.out and "profiler_st" not in text.err
    assert "from NCHW" in chart_in(out).message or "NCHW's time" in chart_in(out).message


def test_sums_count_each_layer_as_often_as_a_step_computes_it() -> None:
    moved = Moves((Reorder("abcd", "acdb", 0.25),), (0.5,))

    def operation(which: Pass, seconds: float, count: int, is_needed: bool) -> Operation:
        times = Times("NCHW", [moved] * NUM_LOGGED, [seconds, 2 * seconds])
        return Operation(times, "a", "", count, which, is_needed, None)

    operations = [
        operation(Pass.FORWARD, 1.0, 3, True),
        operation(Pass.BACKWARD_DATA, 100.0, 1, False),
        operation(Pass.BACKWARD_WEIGHTS, 2.0, 1, True),
    ]
    (row,) = sums("all", operations)["layouts"]
    assert row["time_s"]["median"] == pytest.approx(1.5 * (3 * 1.0 + 2.0))
    assert row["reorders"] == {"abcd>acdb": 4} and row["reorder_s"] == pytest.approx(4 * 0.25)
    assert row["num_copies"] == 4 and row["copy_s"] == pytest.approx(4 * 0.5)
