"""Benchmarks of one device, from command to figure."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from lab import bench
from lab.benchmarks.harness import ENOUGH_ROUNDS
from lab.benchmarks.present import is_result, text_of
from lab.convolution import Pass
from lab.convolution.algorithms import ALGORITHMS
from lab.device import callgrind, convolution, counters, layout, roofline, throughput
from lab.device.counters import hits
from lab.device.formats import Moves
from lab.device.layout import NUM_LOGGED, Times
from lab.training import assemble
from tests.support.commands import refusal
from tests.unit.benchmarks.test_shown import chart_in, committed, readable

LENET = ("model=lenet", "batch_size=2", "threads=1", "rounds=6")


def measured(folder: Path, *words: str) -> dict[str, Any]:
    """Run a benchmark, and read the result that it writes to a.json."""
    out = folder / "a.json"
    assert bench.main([*words, f"out={out}"]) == 0
    return json.loads(out.read_text())


def test_every_algorithm_is_measured_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convolution, "BUDGET_S", 0.0)
    rows = measured(tmp_path, "convolution", *LENET)["rows"]
    assert len(rows) == 2 * 3 * len(ALGORITHMS)
    assert {row["shape"] for row in rows} == {"1x32x32 -> 20, 5x5", "20x14x14 -> 50, 5x5"}
    for row in rows:
        if row["algorithm"] in ("winograd2x3", "winograd4x3"):
            assert row["refused"] == "kernel (5, 5): must be (3, 3)" and row["time_s"] is None
        else:
            assert row["refused"] is None and row["error"] < 1e-4
            assert row["num_rounds"] == ENOUGH_ROUNDS and row["ratio"]["low"]
    assert all(row["implementation"] for row in rows if row["algorithm"] == "library")
    text = capfd.readouterr().out
    assert "[1/2] features.0: 1x32x32 -> 20, 5x5" in text and "onednn_verbose" not in text
    assert "the first layer's backward data" in text
    assert (tmp_path / "a.png").is_file()


def row_of(
    algorithm: str, which: str, seconds: float | None, first: bool = False
) -> dict[str, Any]:
    time_s = None if seconds is None else {"median": seconds, "mad": 0.0}
    return {
        "layer": "a" if first else "b",
        "is_first": first,
        "count": 1 if first else 2,
        "pass": which,
        "algorithm": algorithm,
        "time_s": time_s,
        "executed": 10,
    }


def test_sums_take_the_library_for_what_is_refused_and_leave_out_what_no_step_needs() -> None:
    rows = [
        row_of("library", "forward", 3.0, first=True),
        row_of("gemm", "forward", 2.0, first=True),
        row_of("library", "backward data", 100.0, first=True),
        row_of("gemm", "backward data", 100.0, first=True),
        row_of("library", "forward", 5.0),
        row_of("gemm", "forward", None),
    ]
    found = {each["algorithm"]: each for each in convolution.sums(rows)}
    assert {name: each["seconds"] for name, each in found.items()} == {
        "library": 3 + 2 * 5,
        "gemm": 2 + 2 * 5,
        "best of each": 2 + 2 * 5,
    }
    assert (found["gemm"]["num_own"], found["gemm"]["num_passes"]) == (1, 2)


def test_memory_of_ranks_that_exchange(tmp_path: Path) -> None:
    large = ("model=lenet", "data.size=96")  # so that few batches are tried until none fits
    words = (*large, "batch_size=64", "num_ranks=4", "memory_gb=1")
    exact, lossy = measured(tmp_path, "footprint", *words, "strategy=allreduce,onebit")["rows"]
    assert exact["per_rank_batch_size"] == 16
    (weak,) = measured(tmp_path, "footprint", *words, "strategy=allreduce", "scaling=weak")["rows"]
    assert exact["largest_batch"] == 4 * weak["largest_batch"] > 0  # values of batch_size
    assert lossy["bytes"]["exchange"] > exact["bytes"]["exchange"] > 0  # residuals
    assert bench.main(["footprint", "num_ranks=4", "batch_size=6"]) == 2
    assert "num_ranks=2: measured=true trains on one rank" in refusal(
        bench.main, "footprint", "num_ranks=2", "measured=true"
    )


def test_throughput_has_a_line_for_each_batch_and_a_knee(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("model=mlp", "batch_size=2,32", "threads=1", "rounds=6")
    result = measured(tmp_path, "throughput", *words)
    few, many = result["rows"]
    assert (few["batch_size"], many["batch_size"]) == (2, 32)
    for row in (few, many):
        assert row["inference"]["median"] > 0 and row["training"]["median"] > 0
        assert 0 < row["products_share"] < 1 and row["utilisation"] > 0
        assert row["step_s"]["median"] == pytest.approx(
            row["batch_size"] / row["training"]["median"], rel=0.5
        )
    knees = result["knees"][""]
    assert knees.keys() == {"training", "inference"} and {*knees.values()} <= {2, 32}
    assert few["formula"] is None  # of fully connected layers alone
    assert f"second is {knees['training']} in training" in capsys.readouterr().out


def test_throughput_compares_settings_at_one_batch_and_has_no_knee(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("batch_size=4", "model=lenet,mlp", "threads=1", "rounds=6")
    result = measured(tmp_path, "throughput", *words)
    lenet, mlp = result["rows"]
    assert (lenet["name"], mlp["series"]) == ("model=lenet", "model=mlp")
    assert result["knees"] == {} and lenet["flops_per_sample"] > 3 * mlp["flops_per_sample"]
    assert lenet["formula_flops"] == 2 * (20 * 28 * 28 * 25 + 50 * 10 * 10 * 20 * 25)
    text = capsys.readouterr().out
    assert (
        "knee" not in text and "lenet: the forward pass of one image takes 0.007044 GFLOP" in text
    )
    assert "Training lenet, mlp: model=" in chart_in(tmp_path / "a.json").message


def test_throughput_has_a_curve_and_a_knee_for_each_series_of_batches() -> None:
    result = committed("throughput")
    compiled = [{**row, "series": "compile=true"} for row in result["rows"]]
    result["rows"] += compiled
    result["knees"] = throughput.knees(result["rows"])
    assert throughput.series_of("batch_size=8 compile=true") == "compile=true"
    assert set(result["knees"]) == {"", "compile=true"}
    assert "knee (default): " in text_of(result) and "knee (compile=true): " in text_of(result)
    assert readable(result).message.startswith("Training resnet50 gains less than 5 % beyond")


def test_the_knee_is_the_first_batch_close_to_the_best_rate() -> None:
    rates = {8: 50.0, 1: 10.0, 4: 49.0, 2: 30.0}
    rows = [{"batch_size": b, "training": {"median": rate}} for b, rate in rates.items()]
    assert throughput.knee(rows, "training") == 4


def test_layers_stand_under_the_roofs_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roofline, "COPIES", (200_000, 8_000_000))
    monkeypatch.setattr(roofline, "STEPS", 8)
    rows = measured(tmp_path, "roofline", "model=lenet", "batch_size=4", "threads=1")["rows"]
    assert [row["way"] for row in rows] == ["forward", "backward"] * 4
    first, first_backward, second, second_backward = rows[:4]
    assert first["flops"] == 4 * 2 * 20 * 28 * 28 * 25  # 4 images, 20 maps of 28x28, 5x5 filters
    assert first_backward["flops"] == first["flops"]  # of weights alone: the input needs none
    assert second_backward["flops"] == 2 * second["flops"]
    for row in rows:
        assert row["seconds"] > 0 and row["of_roof"] > 0 and row["loose_bytes"] <= row["num_bytes"]
    text = capsys.readouterr().out
    assert "copies: of 200 kB " in text and "fusable: bytes moved by operations" in text


def test_layers_and_rest_are_compared_with_a_plain_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("model=lenet", "batch_size=16", "threads=1", "rounds=6", "input_grad=true")
    (row,) = measured(tmp_path, "layers", *words)["rows"]
    kinds = [layer["kind"] for layer in row["layers"]]
    assert kinds == [
        *("Conv2d", "MaxPool2d", "Conv2d", "MaxPool2d", "Flatten", "Linear", "ReLU", "Linear"),
        "loss",
    ]
    ways = ("forward_s", "backward_s")
    parts = sum(layer[way]["median"] for layer in row["layers"] for way in ways)
    assert 0 < parts < row["sum_s"]["median"]
    assert row["sum_ratio"]["low"] < row["sum_ratio"]["median"] < row["sum_ratio"]["high"]
    assert row["input_grad_s"]["low"] is not None
    biased = [layer["kind"] for layer in row["layers"] if layer["bias_s"]]
    assert biased == ["Conv2d", "Conv2d", "Linear", "Linear"]
    text = capfd.readouterr().out
    for said in ("biases take", "add up to", "convolutions take", "times as long as forward"):
        assert said in text
    assert "the gradient of the model's input takes" in text
    assert chart_in(tmp_path / "a.json").message.startswith("Conv2d takes ")


def test_several_settings_are_compared_by_kind_and_a_compiled_step_by_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "BACKEND", "eager")  # its kernels are not the subject
    words = ("model=mlp", "batch_size=8", "threads=1", "rounds=6", "compile=false,true")
    eager, whole = measured(tmp_path, "layers", *words)["rows"]
    assert eager["layers"] and not whole["layers"] and whole["compiled"]
    assert whole["phases_s"]["backward"]["median"] > 0
    assert chart_in(tmp_path / "a.json").message.startswith("A step of mlp takes ")


def test_models_are_compared_by_shares_of_their_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    two = ("a=model=lenet batch_size=8 precision=bf16", "b=model=mlp batch_size=16")
    layers = measured(tmp_path, "layers", "threads=1", "rounds=2", *two)["rows"][0]["layers"]
    assert [layer["kind"] for layer in layers if layer["bias_s"]] == ["Conv2d"] * 2 + ["Linear"] * 2
    chart = chart_in(tmp_path / "a.json")
    assert chart.message.endswith(" % of each model's step")
    marks = {line["mark"] for line in chart.spec()["datasets"].popitem()[1] if line["mark"]}
    assert sorted(marks) == pytest.approx([100.0] * len(marks))
    assert "lenet, batch 8: layers and rest add up to" in capfd.readouterr().out


def test_counts_join_their_layers_less_what_calling_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def output_of(program: list[str], variables: dict[str, str], what: str) -> str:
        assert variables["ONEDNN_MAX_CPU_ISA"] == variables["MKL_ENABLE_INSTRUCTIONS"] == "AVX2"
        start = program.index(sys.executable)
        with redirect_stdout(io.StringIO()) as text:
            callgrind.main(program[start + 3 :])
        found = json.loads(text.getvalue())
        if "callgrind" in what:
            out = Path(program[start - 1].removeprefix("--callgrind-out-file="))
            for number in range(1, len(found) + 2):
                values = (
                    f"{100 * number} {30 * number} {20 * number} {3 * number} 2 1 {99 - number}"
                )
                written = f"events: Ir Dr Dw D1mr D1mw DLmr DLmw\ntotals: {values}\n"
                out.with_name(f"{out.name}.{number}").write_text(written)
        return text.getvalue()

    monkeypatch.setattr(counters, "output_of", output_of)
    rows = measured(tmp_path, "counters", "model=lenet", "batch_size=2,4", "isa=avx2")["rows"]
    first, second = rows[:2]
    assert (first["layer"], first["pass"], first["name"]) == ("features.0", "forward", "2")
    assert (second["layer"], second["pass"]) == ("features.0", "backward")
    assert (first["instructions"], second["instructions"]) == (100, 200)
    assert {row["l2_store_misses"] for row in rows} == {0}  # of fewer than calling costs
    assert hits(second, "l1", "load") == pytest.approx(1 - 6 / 60)
    assert {row["name"] for row in rows} == {"2", "4"}
    assert "times as long as without callgrind" in capfd.readouterr().out
    assert "of the instructions of lenet load or store" in chart_in(tmp_path / "a.json").message


@pytest.mark.slow
def test_computed_memory_is_compared_with_that_of_a_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("model=mlp", "model.hidden=[8192,2048]", "batch_size=64", "measured=true")
    (row,) = measured(tmp_path, "footprint", *words)["rows"]
    assert row["measured_bytes"] == pytest.approx(row["total_bytes"], rel=0.15)
    assert "measured (MB)" in capfd.readouterr().out


def test_results_are_told_from_other_files() -> None:
    assert is_result({"bench": "codec"}) and is_result({"bench": "layers"})
    assert not any(map(is_result, (None, [], {}, {"bench": "show"}, {"bench": []})))


LAYOUTS = ["NCHW", "NHWC", "blocked"]


def test_layers_and_steps_take_turns_in_all_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout, "NUM_LOGGED", 1)
    result = measured(tmp_path, "layout", *LENET)
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
    assert "NCHW" in chart_in(tmp_path / "a.json").message  # whichever layout was the fastest here


def test_sums_count_each_layer_as_often_as_a_step_computes_it() -> None:
    moved = Moves((("abcd>acdb", 0.25),), (0.5,))

    def operation(which: Pass, seconds: float, count: int, is_needed: bool) -> Times:
        about = {"count": count, "pass": which, "is_needed": is_needed}
        return Times("NCHW", [moved] * NUM_LOGGED, [seconds, 2 * seconds], about)

    operations = [
        operation(Pass.FORWARD, 1.0, 3, True),
        operation(Pass.BACKWARD_DATA, 100.0, 1, False),
        operation(Pass.BACKWARD_WEIGHTS, 2.0, 1, True),
    ]
    (row,) = layout.sums("all", operations)["layouts"]
    assert row["time_s"]["median"] == pytest.approx(1.5 * (3 * 1.0 + 2.0))
    assert row["reorders"] == {"abcd>acdb": 4} and row["reorder_s"] == pytest.approx(4 * 0.25)
    assert row["num_copies"] == 4 and row["copy_s"] == pytest.approx(4 * 0.5)
