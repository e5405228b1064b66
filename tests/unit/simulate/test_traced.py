"""Profiles of traces: a predicted step, written as Kineto writes it, gives that step again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.measure import Span
from lab.model.profile import Layer, Profile
from lab.predict import main
from lab.settings.storage import events_of, read_trace
from lab.simulate.predict import predicted, read
from lab.simulate.traced import read_profile
from tests.support.commands import refusal

Event = dict[str, Any]
MADE = Path(__file__).parents[2] / "data/kineto/predicted.json.gz"  # by `write` below
MIB, RANKS, BATCH, STEPS = 2**20, 32, 64, 4
MAIN, AUTOGRAD, COMPUTE, NCCL = 1, 2, 7, 20  # threads and streams
SINCE_1970_US = 1_700_000_000_000_000
VALUES = (8 * MIB, 6 * MIB, 4 * MIB)  # of layers in the order of forward; each fills a bucket
PROFILE = Profile(
    *("three", "made", BATCH),
    tuple(Layer(f"l{i}", values, 1.0 + i, 2.0 + i) for i, values in enumerate(VALUES)),
    rest_ms=1.5,
)
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GIVEN = [f"profile.reference_batch={BATCH}"]
GAP_US = 200  # of each layer's backward, in which the host is late
CELL = [
    *("strategy=overlap", "bucket_mb=16", f"world_size={RANKS}", f"batch_size={RANKS * BATCH}"),
    "hardware=v100x8_20g",
    *(f"hardware.{key}=0" for key in ("contention", "jitter", "engage")),  # traces have these
]


def event(
    name: str, tid: int, begin: float, took: float, cat: str = "cpu_op", **args: Any
) -> Event:
    times = {"ts": SINCE_1970_US + begin, "dur": took}
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, **times, "args": args}


def launched(
    number: int, at: float, thread: int, begin: float, end: float, name: str = "gemm", **args: Any
) -> Iterator[Event]:
    """Yield a kernel from `begin` to `end`, in us, and the call that launched it."""
    yield event("cudaLaunchKernel", thread, at, 1, "cuda_runtime", correlation=number)
    stream = NCCL if "nccl" in name else COMPUTE
    yield event(
        name, stream, begin, end - begin, "kernel", correlation=number, stream=stream, **args
    )


def order(span: Span) -> tuple[bool, int]:
    """Return when the host launches a span: a bucket's exchange follows its layer's backward."""
    layer, forward = int(span.name[1]), span.row == "forward"
    return not forward, layer if forward else -layer


def kineto(spans: Sequence[Span], step_s: float, old: bool = False) -> Iterator[Event]:
    """Yield events of steps of these spans: the host launches all of a step at its beginning.

    Args:
        old: sizes are shapes of an operation, as of record_shapes=True before 2024.
    """
    for step in range(STEPS):
        start = 1e6 * step * step_s
        yield event(f"ProfilerStep#{step}", MAIN, start - 5, 90, "user_annotation")
        yield event("autograd::engine::evaluate_function: MmBackward0", AUTOGRAD, start, 80)
        for number, span in enumerate(sorted(spans, key=order), 100 * step):
            at, begin, end = (
                start + s for s in (number % 80, 1e6 * span.start_s, 1e6 * span.end_s)
            )
            if span.row == "exchange":
                values = VALUES[int(span.name[1])]
                args = {"In msg nelems": values, "dtype": "Float", "Group size": RANKS}
                if old:
                    shape = {"Input Dims": [[values]], "Input type": ["float"]}
                    name, args = "nccl:all_reduce", {"external id": number}
                    yield event(name, AUTOGRAD, at, 1, **{"External id": number}, **shape)
                yield from launched(number, at, AUTOGRAD, begin, end, REDUCE, **args)
            elif span.row == "backward":
                yield from launched(number, at, AUTOGRAD, begin + GAP_US, end)
            else:
                yield from launched(number, at, MAIN, begin, end)
        done = start + 1e6 * max(span.end_s for span in spans)
        yield from launched(100 * step + 99, start + 82, MAIN, done + 100, done + 700)


def write(path: Path, events: list[Event]) -> Path:
    about = {
        "deviceProperties": [{"name": "a simulated V100"}],
        "distributedInfo": {"world_size": RANKS},
    }
    path.write_bytes(
        gzip.compress(json.dumps({**about, "traceEvents": events}, default=float).encode())
    )
    return path


def step_of(words: Sequence[str], *changes: str) -> dict[str, Any]:
    keys = {word.partition("=")[0] for word in changes}
    cell = [word for word in CELL if word.partition("=")[0] not in keys]
    (row,) = predicted(read([*words, *cell, *changes]))[0]["rows"]
    return row


@pytest.mark.parametrize("old", [False, True])
def test_a_trace_of_a_predicted_step_predicts_it_and_others(tmp_path: Path, old: bool) -> None:
    file = tmp_path / "three.yaml"
    file.write_text(PROFILE.to_yaml())
    result, spans = predicted(read([f"profile={file}", *CELL]))
    step_s = result["rows"][0]["step_s"]
    trace = write(tmp_path / "step.json.gz", [*kineto(spans, step_s, old)])
    from_trace = [f"profile.from={trace}", *GIVEN]

    row = step_of(from_trace)
    assert row["step_s"] == pytest.approx(step_s, rel=1e-4)
    assert row["measured_s"] == pytest.approx(step_s, rel=1e-4)  # by the trace
    assert (row["evidence"], abs(row["exposed_error"]) < 1e-3) == ("measured", True)
    found = read_profile(trace, {"reference_batch": BATCH})
    assert (found.num_ranks, found.num_steps) == (RANKS, STEPS - 1)  # none begins after the last
    layers = found.profile.layers
    assert [layer.parameters for layer in layers] == list(VALUES)
    backward = [layer.backward_ms for layer in PROFILE.layers]
    assert [layer.backward_ms for layer in layers] == pytest.approx(backward, rel=1e-4)
    assert [layer.fixed_backward_ms for layer in layers] == pytest.approx([GAP_US / 1e3] * 3)

    for others in ("hardware.inter.bandwidth_bytes_per_s=1e11", "strategy=onebit", "bucket_mb=64"):
        replayed, made = step_of(from_trace, others), step_of([f"profile={file}"], others)
        assert replayed["step_s"] == pytest.approx(made["step_s"], rel=1e-3)


def without(word: str) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [event for event in events if word not in str(event)]


def renamed(old: str, new: str) -> Callable[[list[Event]], list[Event]]:
    return lambda events: json.loads(json.dumps(events, default=float).replace(old, new))


@pytest.mark.parametrize(
    ("change", "words", "reason"),
    [
        (list, [], "contains no batch size; give profile.reference_batch="),
        (list, ["profile.reference_batch=-4"], "reference_batch=-4: must be an integer"),
        (list, ["profile=alexnet_p100"], "profile=alexnet_p100 profile.from="),
        (without("ProfilerStep"), GIVEN, "contains no ProfilerStep#"),
        (without("nccl"), GIVEN, "contains no NCCL all-reduce"),
        (without("autograd"), GIVEN, "contains no backward pass"),
        (without("cuda_runtime"), GIVEN, "contains no kernels linked to the calls that launched"),
        (renamed("In msg", "Out msg"), GIVEN, "does not contain the sizes of all-reduces"),
        (renamed("AllReduce", "ReduceScatter"), GIVEN, "contains reduce-scatters, such as those"),
        (renamed('"ts": 1', '"ts": [1], "us": 1'), GIVEN, "contains no ProfilerStep#"),
        (renamed('elems": 8', 'elems": [8], "e": 8'), GIVEN, "is damaged"),
    ],
)
def test_what_a_trace_lacks_is_named_in_one_line(
    tmp_path: Path, change: Callable[[list[Event]], list[Event]], words: list[str], reason: str
) -> None:
    events = change(events_of("trace", MADE, read_trace("trace", MADE)))
    trace = write(tmp_path / "step.json.gz", events)
    line = refusal(main, f"profile.from={trace}", *words, *CELL)
    assert f"profile.from={trace}" in line and reason in line
