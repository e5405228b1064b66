"""Counters: of a loop whose loads are known, by callgrind, and of kernels in a trace."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lab import bench
from lab.device import callgrind
from lab.device.counters import kernels_of, short
from tests.support.commands import refusal, said
from tests.unit.benchmarks.test_shown import chart_in
from tests.unit.device.test_transfer import kernel, write

COPIED = 400_000
LOOP = f"""
static volatile long from[{COPIED}], to[{COPIED}];
int main(void) {{
    begin();
    for (long i = 0; i < {COPIED}; i++) to[i] = from[i];
    end();
    return 0;
}}
"""
COUNTED = """\
version: 1
events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw
fn=(0) f
0 90 30 20 1 8 7 1 6 5
totals: 90 30 20 1 8 7 1 6 5
"""
needs_valgrind = pytest.mark.skipif(
    not (shutil.which("valgrind") and shutil.which("cc")), reason="needs valgrind and a C compiler"
)


@needs_valgrind
def test_a_loop_with_known_loads_and_stores_is_counted_right(tmp_path: Path) -> None:
    source, program = tmp_path / "loop.c", tmp_path / "loop"
    source.write_text(callgrind.MARKS + LOOP)
    subprocess.run(["cc", "-O1", "-o", program, source], check=True)
    command = callgrind.command(tmp_path / "counts", "32768,8,64", "1048576,16,64")
    subprocess.run([*command, program], check=True)
    counts = callgrind.read(tmp_path / "counts.1")
    assert counts["loads"] == pytest.approx(COPIED, rel=0.01)
    assert counts["stores"] == pytest.approx(COPIED, rel=0.01)
    # Eight values share a line, and 3.2 MB fit into neither cache.
    assert counts["l1_load_misses"] == pytest.approx(COPIED / 8, rel=0.01)
    assert counts["l2_load_misses"] == pytest.approx(COPIED / 8, rel=0.01)
    assert counts["instructions"] >= 3 * COPIED


def test_totals_are_read_by_the_names_of_their_events(tmp_path: Path) -> None:
    path = tmp_path / "counts.1"
    path.write_text(COUNTED)
    counts = callgrind.read(path)
    assert list(counts.values()) == [90, 30, 20, 8, 7, 6, 5]
    assert [*counts][1:4] == ["loads", "stores", "l1_load_misses"]


@pytest.mark.parametrize("text", ["", "events: Ir\ntotals: 9\n", "events: Ir Dr Dw D1mr\n"])
def test_files_without_caches_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "counts.1"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a callgrind file with cache counts"):
        callgrind.read(path)


def test_wrong_caches_and_a_missing_valgrind_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"l2=8MB: must be BYTES,WAYS,LINE"):
        callgrind.command(tmp_path, "32768,8,64", "8MB")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="needs valgrind, which is not installed"):
        callgrind.command(tmp_path, "32768,8,64", "8388608,16,64")


def test_a_counted_layer_keeps_the_hooks_of_a_transform() -> None:
    layer, ran = nn.Linear(2, 2), list[object]()
    layer.register_forward_pre_hook(lambda *_: ran.append(layer))
    ((_, noted, inputs),) = callgrind._calls(nn.Sequential(layer), torch.ones(1, 2))
    noted(inputs)
    assert ran == [layer] * 2 and len(layer._forward_pre_hooks) == 1


READ, WRITTEN, BUSY = "dram__bytes_read.sum", "dram__bytes_write.sum", "sm__throughput.pct"


def launch(name: str, device: int = 0, **args: Any) -> dict[str, Any]:
    span = {"ts": 0, "dur": 5, "pid": device, "tid": 0, "ph": "X"}
    return {"cat": "cuda_profiler_range", "name": name, "args": args, **span}


COPY = "void at::native::(anonymous namespace)::copy<float, 4>(int, at::Tensor const&)"
EVENTS = [
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "args": {READ: 5}},
    {"name": "process_name", "ph": "M"},
    kernel(100, 50),
    launch("gemm", **{READ: 100, WRITTEN: 1, BUSY: 90.0, "External id": 7}),
    launch(COPY, **{READ: 10, WRITTEN: 30, BUSY: 10.0}),
    launch("gemm", device=1, **{READ: 200, WRITTEN: 2, BUSY: 40.0}),
    launch("__missing__", **{READ: 0, BUSY: 5.0}),
    launch("gemm", **{READ: 300, WRITTEN: 3, BUSY: 50.0}),
]


def test_sums_are_added_and_rates_averaged_by_kernel() -> None:
    total, gemm, copy, missing = kernels_of(EVENTS)  # gemm: 600 of 610 bytes read
    assert (total["name"], total["num_launches"]) == ("all", 5)
    assert total["metrics"] == {READ: 610, WRITTEN: 36, BUSY: pytest.approx(195 / 5)}
    assert (gemm["name"], gemm["num_launches"]) == ("gemm", 3)
    assert gemm["metrics"] == {READ: 600, WRITTEN: 6, BUSY: pytest.approx(60)}
    assert (copy["name"], copy["metrics"][WRITTEN]) == (COPY, 30)
    assert missing["metrics"] == {READ: 0, BUSY: 5.0}


def test_extremes_of_launches_stay_extremes() -> None:
    metrics = [{"a__b.max": 3, "a__b.min": 2}, {"a__b.max": 7, "a__b.min": 4}]
    total, _ = kernels_of(launch("k", **each) for each in metrics)
    assert total["metrics"] == {"a__b.max": 7, "a__b.min": 2}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, None, "many", [1], 10**400])
def test_a_metric_that_is_no_number_is_left_out_and_counted(value: object) -> None:
    skipped: Counter[str] = Counter()
    damaged = launch("gemm", **{READ: value, WRITTEN: 5})
    total, gemm, *_ = kernels_of([*EVENTS, damaged, {**damaged, "name": None}], skipped)
    assert (gemm["num_launches"], total["metrics"][READ], total["metrics"][WRITTEN]) == (4, 610, 41)
    assert skipped == {
        "metrics that are not numbers from 0 to 2^63": 1,
        "kernels without a name or args": 1,
    }


def test_names_lose_their_namespaces_and_their_end() -> None:
    assert short(COPY) == "copy<float, 4>(int, Tensor const&)"
    assert short("a::{lambda()#1}::b<" + 90 * "c" + ">") == "b<" + 53 * "c" + "…"


def test_a_trace_becomes_a_table_and_a_figure(tmp_path: Path) -> None:
    trace = write(tmp_path / "gpu.json.gz", {"traceEvents": EVENTS})
    out = tmp_path / "out.json"
    lines = said(bench.main, "counters", f"trace={trace}", f"out={out}").splitlines()
    assert lines[0].split() == ["launches", READ, WRITTEN, BUSY]
    assert [line.split()[-4:] for line in lines[1:5]] == [
        ["3", "600", "6", "60"],
        ["1", "10", "30", "10"],
        ["1", "0", "-", "5"],
        ["5", "610", "36", "39"],
    ]
    assert "__missing__: kernels without a name" in "\n".join(lines[5:])
    assert chart_in(out).message == f"gemm has 98 % of all {READ}"


def test_what_holds_no_counters_is_one_line_and_code_2(tmp_path: Path) -> None:
    no_kernel, no_metrics = kernel(100, 50), {"cat": "cuda_profiler_range", "name": "a", "args": {}}
    unknown = {"cat": "cuda_profiler_range", "name": "a"}
    for event, why in (
        (no_kernel, "profiler_measure_per_kernel=True"),
        (no_metrics, "profiler_measure_per_kernel=True"),
        (unknown, "left out: kernels without a name or args: 1"),
    ):
        trace = write(tmp_path / "a.json", [event])
        line = refusal(bench.main, "counters", f"trace={trace}")
        assert line.startswith(f"trace={trace} contains no kernel metrics") and why in line
