"""Copies in a trace: against a count by hand, and what is no trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lab import bench
from lab.layers.trace import read_events
from lab.layers.transfer import copies_of
from tests.support.figures import keep_saved, ticks


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


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize("trace", [EVENTS, {"traceEvents": EVENTS}])
def test_copies_add_up_by_kind(tmp_path: Path, name: str, trace: object) -> None:
    found = copies_of(read_events(write(tmp_path / name, trace)))
    pinned, inside, back = found
    assert [each.direction for each in found] == ["HtoD", "DtoD", "DtoH"]
    assert (pinned.kind, pinned.invocations, pinned.num_bytes) == ("Pinned -> Device", 2, 2_000_500)
    assert pinned.seconds == pytest.approx(160e-6)
    assert pinned.hidden_s == pytest.approx(30e-6)
    assert pinned.sizes == (1, 0, 0, 0, 1, 0)
    assert inside.hidden_s == pytest.approx(30e-6)
    assert (back.hidden_s, back.sizes) == (0.0, (1, 0, 0, 0, 0, 0))


def test_a_copy_of_another_name_is_kept() -> None:
    (found,) = copies_of([{**EVENTS[6], "name": "CopyDeviceToDevice"}])
    assert (found.direction, found.kind) == ("other", "CopyDeviceToDevice")


def test_the_table_has_the_published_copies_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = keep_saved(monkeypatch)
    trace = write(tmp_path / "mine.json.gz", EVENTS)
    assert bench.main(["transfer", f"trace={trace}", f"out={tmp_path / 'out.json'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:8] == ["HtoD", "Pinned", "->", "Device", "2", "2.000", "1000.25"] + [
        "12.503"
    ]
    assert sum("published: " in line for line in lines[:10]) == 6
    assert "other" not in lines[1] and str(tmp_path) not in "\n".join(lines[10:-1])
    assert ticks(saved["out.png"].axes[1], "y")[0] == "HtoD\nPinned -> Device"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"nothing", "is no trace: "),
        (b"\x1f\x8bnothing", "is no trace: "),
        (gzip.compress(b"[]", mtime=0)[:-3], "is no trace: "),
        (b"3", "is no trace: has no list of traceEvents"),
        (b'{"traceEvents": {"a": 1}}', "is no trace: has no list of traceEvents"),
        (b"[1, 2]", "is no trace: has no list of traceEvents"),
        (b"[]", "holds no copies between host and device"),
        (json.dumps(EVENTS[:6]).encode(), "a run on CPUs makes none"),
        (b'[{"cat": "gpu_memcpy", "name": "x", "pid": 0}]', "KeyError 'ts'"),
        (b'[{"cat": "kernel", "pid": 0, "ts": "soon", "dur": 1}]', "ValueError"),
    ],
)
def test_what_is_no_trace_with_copies_is_one_line_and_code_2(
    tmp_path: Path, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    assert bench.main(["transfer", f"trace={path}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lab.bench: error: trace=") and message in err and err.count("\n") == 1


def test_a_trace_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["transfer"]) == 2
    assert "trace=null: must be a trace of torch.profiler" in capsys.readouterr().err
    assert bench.main(["transfer", "batch_size=3"]) == 2
