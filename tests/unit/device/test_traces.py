"""Ten traces as three vendors' tools write them: their figures are those of an independent count.

Shapes of events follow Kineto (libkineto/src/output_json.cpp; before 2022 docs and tests of its
TensorBoard plugin), XLA (xplane to trace events), rocprof (bin/dform.py of ROCm/rocprofiler) and
rocprofv3 (its tests' test_memory_copy_trace).
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
from lab.device.trace import copies_of, read_events

Event = dict[str, Any]
# Of a device: begin and length in nanoseconds; of a copy also its bytes.
Work = tuple[list[tuple[int, int, int]], list[tuple[int, int]]]
EPOCH_NS = 1_695_835_535_000_000_000
WITHIN = 1e-3
KINETO = ("gpu_memcpy", "kernel")  # categories


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


def kineto(copies: Any, kernels: Any, base: int, name: str, categories: tuple[str, str]) -> str:
    """Write events of Kineto; times in decimals, as no float would hold them."""
    events = [
        f'{{"ph": "X", "cat": "{categories[0]}", "name": "{name}", "pid": 0, "tid": 7, '
        f'"ts": {us(base + begin)}, "dur": {us(length)}, "args": {{"device": 0, "bytes": {size}}}}}'
        for begin, length, size in copies
    ]
    events += [
        f'{{"ph": "X", "cat": "{categories[1]}", "name": "gemm", "pid": 0, "tid": 9, '
        f'"ts": {us(base + begin)}, "dur": {us(length)}, "args": {{"device": 0}}}}'
        for begin, length in kernels
    ]
    return ",\n".join(events)


def of_kineto(
    name: str, base: int = EPOCH_NS, categories: tuple[str, str] = KINETO
) -> Callable[..., str]:
    def write(copies: Any, kernels: Any) -> str:
        events = kineto(copies, kernels, base, name, categories)
        return f'{{"schemaVersion": 1, "traceEvents": [{events}]}}'

    return write


def of_kineto_as_list(copies: Any, kernels: Any) -> str:
    return f"[{kineto(copies, kernels, 0, 'Memcpy DtoH (Device -> Pinned)', KINETO)}]"


def of_xla(pinned: str) -> Callable[..., str]:
    def write(copies: Any, kernels: Any) -> str:
        threads = [(13, "Stream #13(Compute)"), (14, "Stream #14(MemcpyH2D)"), (1, "XLA Ops")]
        events: list[Event] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in threads
        ]
        for begin, length, size in copies:
            details = f"kind_src:{pinned} kind_dst:device size:{size} dest:0 async:1"
            span = {"ts": begin / 1000, "dur": length / 1000, "args": {"memcpy_details": details}}
            events.append({"ph": "X", "pid": 1, "tid": 14, "name": "MemcpyH2D", **span})
        for begin, length in kernels:
            span = {"ph": "X", "pid": 1, "ts": begin / 1000, "dur": length / 1000}
            events += [{**span, "tid": tid, "name": "fusion"} for tid in (13, 1)]
        return json.dumps({"displayTimeUnit": "ns", "traceEvents": events})

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
    "kineto, CUDA": (of_kineto("Memcpy HtoD (Pinned -> Device)"), False),
    "kineto, CUDA, from a base": (
        of_kineto("Memcpy HtoD (Pageable -> Device)", 88_511_388_202_755),
        False,
    ),
    "kineto, CUDA, before 2022": (
        of_kineto("Memcpy DtoH (Device -> Pinned)", categories=("Memcpy", "Kernel")),
        True,
    ),
    "kineto, CUDA, a list": (of_kineto_as_list, False),
    "kineto, ROCm": (of_kineto("Memcpy HtoD (Host -> Device)"), False),
    "kineto, ROCm, older": (of_kineto("CopyHostToDevice", categories=("kernel", "kernel")), False),
    "rocprof": (of_rocprof, False),
    "rocprofv3": (of_rocprofv3, False),
    "jax, pinned": (of_xla("pinned"), False),
    "jax, pageable": (of_xla("pageable"), True),
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
    assert (found.invocations, found.num_bytes) == (number, size)
    assert found.seconds == pytest.approx(took_ns / 1e9, rel=WITHIN)
    assert found.hidden_s == pytest.approx(hidden_ns / 1e9, rel=WITHIN)


# From the results.json of `rocprof --sys-trace` on an MI300A in issue 4273 of ROCm/ROCm.
PUBLIC = """[{"ph":"X","name":"CopyHostToDevice","pid":1,"tid":0,"ts":"692706620838","dur":"4"},
{"ph":"X","name":"CopyHostToDevice","pid":1,"tid":0,"ts":"692706621993","dur":"3"},
{"ph":"X","name":"CopyDeviceToHost","pid":1,"tid":0,"ts":"692706650780","dur":"4"}]"""


def test_a_trace_without_sizes_is_answered_with_what_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content, said in (
        ("a.json", PUBLIC.encode(), "rocprofv3 --sys-trace --output-format json has them): 3"),
        ("a.pftrace", b"\x0a\x00\x01", "rocprofv3 --sys-trace --output-format json"),
        ("a.xplane.pb", b"\x0a\x00\x01", "XLA writes the .trace.json.gz beside it"),
        ("b.json", b'{"rocprofiler-sdk-tool": [{"agents": []}]}', "is not a trace of rocprofv3"),
    ):
        (tmp_path / name).write_bytes(content)
        assert bench.main(["transfer", f"trace={tmp_path / name}"]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_public_copies_count_as_issue_4273_lists_them_once_sizes_are_known() -> None:
    events = [{**event, "args": {"bytes": 512}} for event in json.loads(PUBLIC)]
    found = {each.direction: (each.invocations, each.seconds) for each in copies_of(events)}
    assert found == {"HtoD": (2, pytest.approx(7e-6)), "DtoH": (1, pytest.approx(4e-6))}
