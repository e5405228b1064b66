"""Traces as two vendors' tools write them: their figures are those of an independent count.

Shapes of events follow Kineto (libkineto/src/output_json.cpp; before 2022 docs and tests of its
TensorBoard plugin), rocprof (bin/dform.py of ROCm/rocprofiler) and rocprofv3 (its tests'
test_memory_copy_trace).
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab import bench
from lab.device.transfer import copies_of, read_events
from tests.support.commands import refusal

Event = dict[str, Any]
# Of a device: begin and length in nanoseconds; of a copy also its bytes.
Work = tuple[list[tuple[int, int, int]], list[tuple[int, int]]]
EPOCH_NS = 1_695_835_535_000_000_000
WITHIN = 1e-3


def work(seed: int, whole_us: bool = False) -> Work:
    """Return copies to a device, mostly of about 1.3 µs, and kernels that overlap some of them."""
    draw, unit = np.random.default_rng(seed), 1000 if whole_us else 1
    begins = np.cumsum(draw.integers(2, 40, 300)) * 1000 + draw.integers(0, 999, 300) // unit * unit
    lengths = draw.integers(1, 3, 300) * 1000 if whole_us else draw.integers(900, 1700, 300)
    sizes = draw.choice([4, 4096, 1 << 20], 300)
    kernels = np.cumsum(draw.integers(3, 50, 200)) * 1000
    spans = draw.integers(1, 30, 200) * 1000
    copies = zip(begins.tolist(), lengths.tolist(), sizes.tolist(), strict=True)
    return [*copies], [*zip(kernels.tolist(), spans.tolist(), strict=True)]


def counted(copies: list[tuple[int, int, int]], kernels: list[tuple[int, int]]) -> tuple[Any, ...]:
    """Count copies, bytes, nanoseconds and hidden nanoseconds, a nanosecond at a time."""
    end = max(begin + length for begin, length, *_ in (*copies, *kernels))
    busy = np.zeros(end + 1, bool)
    for begin, length in kernels:
        busy[begin : begin + length] = True
    hidden = sum(int(busy[begin : begin + length].sum()) for begin, length, _ in copies)
    return (
        len(copies),
        sum(size for *_, size in copies),
        sum(length for _, length, _ in copies),
        hidden,
    )


def us(nanoseconds: int) -> str:
    """Write microseconds as tools do, in decimals."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def of_kineto(of_copies: str, of_kernels: str) -> Callable[..., str]:
    """Write events of these categories; times in decimals, as no float would hold them."""

    def event(category: str, begin: int, length: int, args: str = "{}") -> str:
        name = "gemm" if category == of_kernels else "Memcpy HtoD (Pinned -> Device)"
        return (
            f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 0, '
            f'"ts": {us(EPOCH_NS + begin)}, "dur": {us(length)}, "args": {args}}}'
        )

    def write(copies: Any, kernels: Any) -> str:
        events = [event(of_copies, at, took, f'{{"bytes": {size}}}') for at, took, size in copies]
        events += [event(of_kernels, *span) for span in kernels]
        return f'{{"schemaVersion": 1, "traceEvents": [{", ".join(events)}]}}'

    return write


def of_rocprof(copies: Any, kernels: Any) -> str:
    """Whole microseconds as texts, and nanoseconds in args; with the bytes that it lacks."""

    def event(name: str, begin: int, length: int, **args: Any) -> Event:
        times = {"BeginNs": str(EPOCH_NS + begin), "EndNs": str(EPOCH_NS + begin + length)}
        span = {"ts": str(begin // 1000), "dur": str(length // 1000), "args": {**times, **args}}
        return {"ph": "X", "pid": 6, "tid": 0, "name": name, **span}

    events = [event("CopyHostToDevice", *span, bytes=size) for *span, size in copies]
    events += [{**event("gemm", *span), "cat": "kernel"} for span in kernels]
    return json.dumps({"traceEvents": events})


def of_rocprofv3(copies: Any, kernels: Any) -> str:
    def times(begin: int, length: int) -> Event:
        return {"start_timestamp": EPOCH_NS + begin, "end_timestamp": EPOCH_NS + begin + length}

    cpu, gpu = {"handle": 11}, {"handle": 42}
    ends = {"src_agent_id": cpu, "dst_agent_id": gpu}
    records = {
        "memory_copy": [{**times(*span), **ends, "bytes": size} for *span, size in copies],
        "kernel_dispatch": [
            {**times(*span), "dispatch_info": {"agent_id": gpu}} for span in kernels
        ],
    }
    agents = [{"id": cpu, "type": 1}, {"id": gpu, "type": 2}]
    return json.dumps({"rocprofiler-sdk-tool": [{"agents": agents, "buffer_records": records}]})


TRACES: dict[str, tuple[Callable[..., str], bool]] = {
    "kineto": (of_kineto("gpu_memcpy", "kernel"), False),
    "kineto before 2022": (of_kineto("Memcpy", "Kernel"), True),
    "rocprof": (of_rocprof, False),
    "rocprofv3": (of_rocprofv3, False),
}


@pytest.mark.parametrize("name", TRACES)
def test_figures_are_those_of_an_independent_count(name: str, tmp_path: Path) -> None:
    write, whole_us = TRACES[name]
    copies, kernels = work(len(name), whole_us)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(write(copies, kernels).encode()))
    skipped: Counter[str] = Counter()
    (found,) = copies_of(read_events(path), skipped)
    number, size, took_ns, hidden_ns = counted(copies, kernels)
    assert not skipped and 0.1 < hidden_ns / took_ns < 0.9
    assert (found["invocations"], found["num_bytes"]) == (number, size)
    assert found["seconds"] == pytest.approx(took_ns / 1e9, rel=WITHIN)
    assert found["hidden_s"] == pytest.approx(hidden_ns / 1e9, rel=WITHIN)


# From the results.json of `rocprof --sys-trace` on an MI300A in issue 4273 of ROCm/ROCm.
PUBLIC = """[{"ph":"X","name":"CopyHostToDevice","pid":1,"tid":0,"ts":"692706620838","dur":"4"},
{"ph":"X","name":"CopyHostToDevice","pid":1,"tid":0,"ts":"692706621993","dur":"3"},
{"ph":"X","name":"CopyDeviceToHost","pid":1,"tid":0,"ts":"692706650780","dur":"4"}]"""


def test_a_trace_without_sizes_is_answered_with_what_has_them(tmp_path: Path) -> None:
    for name, content, said in (
        ("a.json", PUBLIC.encode(), "rocprofv3 --sys-trace --output-format json records them): 3"),
        ("a.pftrace", b"\x0a\x00\x01", "rocprofv3 --sys-trace --output-format json"),
        ("a.xplane.pb", b"\x0a\x00\x01", "use the .trace.json.gz that XLA writes next to it"),
        ("b.json", b'{"rocprofiler-sdk-tool": [{"agents": []}]}', "not a rocprofv3 trace"),
    ):
        (tmp_path / name).write_bytes(content)
        assert said in refusal(bench.main, "transfer", f"trace={tmp_path / name}")
