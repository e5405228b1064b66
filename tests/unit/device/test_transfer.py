"""Copies in a trace: against a count by hand, and what is no trace."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lab import bench
from lab.device.transfer import copies_of, read_events
from tests.support.commands import refusal, said
from tests.unit.benchmarks.test_shown import chart_in

KEYS = ("ts", "dur")


def copy(
    begin_us: float, took_us: float, size: float, name: str, device: int = 0
) -> dict[str, Any]:
    span = {"ts": begin_us, "dur": took_us, "pid": device, "ph": "X"}
    return {"cat": "gpu_memcpy", "name": f"Memcpy {name}", "args": {"bytes": size}, **span}


def kernel(begin_us: float, took_us: float, device: int = 0) -> dict[str, Any]:
    span = {"ts": begin_us, "dur": took_us, "pid": device}
    return {"cat": "kernel", "name": "gemm", "ph": "X", **span}


EVENTS = [
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0},
    {"name": "process_name", "ph": "M"},
    kernel(100, 50),
    kernel(120, 60),  # overlaps the first: together 100 to 180
    kernel(300, 10),
    kernel(0, 1000, device=1),
    copy(90, 20, 500, "HtoD (Pinned -> Device)"),  # 10 of 20 behind kernels
    copy(170, 140, 2_000_000, "HtoD (Pinned -> Device)"),  # 10 and 10 of 140
    copy(400, 5, 999, "DtoH (Device -> Pageable)"),
    copy(10, 30, 4096, "DtoD (Device -> Device)", device=1),
    copy(10, 30, 4096, "DtoD (Device -> Device)", device=2),  # which has no kernels
]


def write(path: Path, trace: object) -> Path:
    text = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize(
    ("name", "trace"), [("a.json", EVENTS), ("a.json.gz", {"traceEvents": EVENTS})]
)
def test_copies_add_up_by_kind(tmp_path: Path, name: str, trace: object) -> None:
    found = copies_of(read_events(write(tmp_path / name, trace)))
    pinned, inside, back = found
    assert [each["direction"] for each in found] == ["HtoD", "DtoD", "DtoH"]
    assert (pinned["kind"], pinned["invocations"], pinned["num_bytes"]) == (
        "Pinned -> Device",
        2,
        2_000_500,
    )
    assert pinned["seconds"] == pytest.approx(160e-6)
    assert pinned["hidden_s"] == pytest.approx(30e-6)
    assert pinned["sizes"] == [1, 0, 0, 0, 1, 0]
    assert inside["hidden_s"] == pytest.approx(30e-6)
    assert (back["hidden_s"], back["sizes"]) == (0.0, [1, 0, 0, 0, 0, 0])


def test_a_copy_of_another_name_is_kept() -> None:
    (found,) = copies_of([{**EVENTS[6], "name": "Copying"}])
    assert (found["direction"], found["kind"]) == ("other", "Copying")


@pytest.mark.parametrize(
    ("name", "direction", "kind"),
    [
        ("Memcpy HtoD (Host -> Device)", "HtoD", "Host -> Device"),
        ("CopyHostToDevice", "HtoD", "Host -> Device"),
        ("CopyDeviceToHost2D", "DtoH", "Device -> Host"),
        ("MEMORY_COPY_DEVICE_TO_DEVICE", "DtoD", "Device -> Device"),
        ("MemcpyP2P", "PtoP", "MemcpyP2P"),
    ],
)
def test_names_of_other_vendors_are_understood(name: str, direction: str, kind: str) -> None:
    """ROCm's older profilers call copies kernels; others write no categories at all."""
    for category in ("gpu_memcpy", "kernel", None):
        event = {**copy(0, 5, 8, ""), "name": name, "cat": category}
        (found,) = copies_of([event, kernel(0, 5)])
        assert (found["direction"], found["kind"]) == (direction, kind), category
        assert (found["num_bytes"], found["hidden_s"]) == (8, pytest.approx(5e-6))


def test_xlas_streams_tell_its_copies_and_kernels_from_the_hosts() -> None:
    def on(thread: int, name: str, begin_us: float, took_us: float, **args: Any) -> dict[str, Any]:
        span = {"ts": begin_us, "dur": took_us, "pid": 1, "tid": thread}
        return {"ph": "X", "name": name, "args": args, **span}

    def thread(number: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}

    details = "kind_src:pageable kind_dst:device size:4096 dest:0 async:1"
    events = [
        thread(13, "Stream #13(Compute)"),
        thread(14, "Stream #14(MemcpyH2D)"),
        thread(20, "XLA Ops"),
        on(13, "loop_fusion", 0, 10),
        on(14, "MemcpyH2D", 5, 10, memcpy_details=details),
        on(14, "Memset", 0, 100),
        on(20, "fusion", 0, 100),
        on(7, "MemcpyH2D", 5, 10, memcpy_details=details),  # the host's call
    ]
    (found,) = copies_of(events)
    assert (found["direction"], found["kind"]) == ("HtoD", "Pageable -> Device")
    assert (found["invocations"], found["num_bytes"]) == (1, 4096)
    assert found["seconds"] == pytest.approx(10e-6) and found["hidden_s"] == pytest.approx(5e-6)


DAMAGED = [float("nan"), float("inf"), -1, None, "soon", [1], 10**400]


@pytest.mark.parametrize("value", DAMAGED, ids=lambda value: str(value)[:5])
def test_an_event_without_a_number_is_left_out_and_counted(value: object) -> None:
    good = copy(90, 20, 500, "HtoD (Pinned -> Device)")
    events = [good, kernel(90, 10), {**good, "args": {"bytes": value}}]
    events += [{**each, key: value} for each in (good, kernel(0, 200)) for key in ("ts", "dur")]
    skipped: Counter[str] = Counter()
    (found,) = copies_of(events, skipped)
    assert found == copies_of([good, kernel(90, 10)])[0]
    assert (found["invocations"], found["hidden_s"]) == (1, pytest.approx(10e-6))
    why = "without {}" if value is None else "where {} is not a number from 0 to 2^63"
    reasons = [
        ("copies", "bytes"),
        *((what, key) for what in ("copies", "kernels") for key in KEYS),
    ]
    assert skipped == {f"{what} {why.format(key)}": 1 for what, key in reasons}


def test_what_rocm_copies_by_a_kernel_is_neither_a_kernel_nor_lost() -> None:
    names = (
        "__amd_rocclr_copyBuffer",
        "__amd_rocclr_copyBufferRect",
        "__amd_rocclr_fillBufferAligned",
    )
    events = [{**kernel(90, 20), "name": name} for name in names]
    skipped: Counter[str] = Counter()
    (found,) = copies_of([*events, EVENTS[6]], skipped)
    assert found["hidden_s"] == 0
    assert skipped == {"copies that a ROCm kernel made, without bytes": 2}


def test_the_command_says_what_it_left_out(tmp_path: Path) -> None:
    damaged = [{**EVENTS[6], "args": {}}] * 3 + [{**EVENTS[2], "dur": float("nan")}]
    trace = write(tmp_path / "mine.json", [*EVENTS, *damaged])
    left_out = "copies without bytes: 3; kernels where dur is not a number from 0 to 2^63: 1"
    assert f"left out: {left_out}\n" in said(bench.main, "transfer", f"trace={trace}")


def test_a_trace_becomes_a_table_and_a_figure(tmp_path: Path) -> None:
    trace = write(tmp_path / "mine.json.gz", EVENTS)
    out = tmp_path / "out.json"
    lines = said(bench.main, "transfer", f"trace={trace}", f"out={out}").splitlines()
    assert " ".join(lines[1].split()[:8]) == "HtoD Pinned -> Device 2 2.000 1000.25 12.503"
    assert "other" not in lines[1] and str(tmp_path) not in "\n".join(lines[:-1])
    message = chart_in(out).message
    assert message == "Copies take 0.225 ms, 27 % of which is hidden by kernels"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"nothing", "not a trace: "),
        (b"\x1f\x8bnothing", "not a trace: "),
        (gzip.compress(b"[]", mtime=0)[:-3], "not a trace: "),
        (b"3", "not a trace: it has no list of traceEvents"),
        (b'{"traceEvents": {"a": 1}}', "not a trace: it has no list of traceEvents"),
        (b"[1, 2]", "not a trace: it has no list of traceEvents"),
        (b"[]", "contains no copies between host and device"),
        (json.dumps(EVENTS[:6]).encode(), "a run on CPUs makes no such copies"),
        (b'[{"cat": "gpu_memcpy", "name": "x", "ts": 0, "dur": 1}]', "copies without bytes: 1"),
        (b'[{"cat": "kernel", "pid": 0, "ts": "soon", "dur": 1}]', "a run on CPUs makes no such"),
        (b'[{"cat": "cuda_runtime", "name": "hipMemcpyAsync"}]', "such as hipMemcpyAsync (1)"),
        (
            b'[{"name": "MemcpyH2D", "ph": "X", "ts": 0, "dur": 1}]',
            "jax.profiler has them, in memcpy_details",
        ),
    ],
)
def test_what_is_no_trace_with_copies_is_one_line_and_code_2(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    line = refusal(bench.main, "transfer", f"trace={path}")
    assert line.startswith("trace=") and message in line


def test_a_trace_must_be_named() -> None:
    assert "trace=null: give a trace, FILE.json or" in refusal(bench.main, "transfer")
    assert bench.main(["transfer", "batch_size=3"]) == 2
