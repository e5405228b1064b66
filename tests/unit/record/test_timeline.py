"""Timelines: a clock's spans, trace events written and read, and the figure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lab.analysis.runs import timeline_of_step
from lab.distributed.comm import Completed
from lab.distributed.worker import InlineWorker, ThreadWorker, TurnsWorker, Worker
from lab.draw.chart import drawn
from lab.measure import Span
from lab.measure.clock import KEPT_STEPS, Clock
from lab.measure.layers import marked_layers
from lab.plot import main as plot
from lab.record.trace import Timeline, lanes, read_trace, write_trace
from tests.support.commands import refusal
from tests.support.svg import boxes_of, outside, overlapping

CPU = torch.device("cpu")
ABOUT = {"strategy": "overlap", "world_size": 2, "emulation": "none"}


def step(rank: int, begin: float, number: int = 0, length: float = 1.0) -> list[Span]:
    """Return a step whose two exchanges overlap each other and backward."""
    rows = (
        ("step", f"step {number}", 0.0, 1.0),
        ("forward", "forward", 0.0, 0.3),
        ("backward", "backward", 0.3, 0.8),
        ("wait", "exchange", 0.8, 0.9),
        ("exchange", "fc.weight and 1 more", 0.4, 0.7),
        ("codec", "fc.weight and 1 more", 0.4, 0.5),
        ("exchange", "conv.weight", 0.6, 0.9),
        ("optimizer", "update", 0.9, 1.0),
    )
    return [Span(rank, r, n, begin + length * a, begin + length * b) for r, n, a, b in rows]


def test_perfetto_would_drop_no_event(tmp_path: Path) -> None:
    """Of a thread, it takes events that follow each other or nest, in whole nanoseconds."""
    moments = np.cumsum(np.random.default_rng(0).integers(1, 5000, 3000)) * 1e-9
    pairs = zip(moments[:-1], moments[1:], strict=True)
    spans = [Span(0, "forward", "layer", float(begin), float(end)) for begin, end in pairs]
    write_trace(tmp_path / "t.json", spans)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    whole = [event for event in events if event["ph"] == "X"]
    assert len(whole) == len(spans) and {event["tid"] for event in whole} == {0}
    times = [(int(event["ts"] * 1000), int(event["dur"] * 1000)) for event in whole]
    assert all(a + length <= b for (a, length), (b, _) in zip(times, times[1:], strict=False))
    assert sum(length for _, length in times) == round(1e9 * (moments[-1] - moments[0]))


def test_events_have_what_viewers_need(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", [*step(0, 5.0), *step(1, 5.1)], ABOUT)
    trace = json.loads((tmp_path / "t.json").read_text())
    whole = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(whole) == 16
    for event in whole:
        assert {"name", "cat", "pid", "tid", "ts", "dur"} <= event.keys()
        assert event["ts"] >= 0 and event["dur"] >= 0
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in whole} == threads.keys()
    assert [name for (rank, _), name in threads.items() if rank == 1] == [
        *("step", "forward", "backward", "wait", "exchange", "exchange 2", "codec", "optimizer")
    ]
    processes = [event["args"]["name"] for event in named if event["name"] == "process_name"]
    assert processes == ["rank 0", "rank 1"]
    assert trace["otherData"] == ABOUT


def test_lanes_are_filled_from_the_first() -> None:
    spans = [Span(0, "exchange", name, a, b) for name, a, b in (("a", 0, 2), ("b", 1, 3))]
    later = Span(0, "exchange", "c", 2, 4)
    assert {span.name: lane for span, lane in lanes([*spans, later])} == {"a": 0, "b": 1, "c": 0}


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    spans = [*step(0, 0.0), *step(1, 0.125)]
    write_trace(tmp_path / "t.json", spans, ABOUT)
    timeline = read_trace(tmp_path / "t.json")
    assert timeline.about == ABOUT
    back = {(s.rank, s.row, s.name): (s.start_s, s.end_s) for s in timeline.spans}
    assert back.keys() == {(s.rank, s.row, s.name) for s in spans}
    for span in spans:
        assert back[span.rank, span.row, span.name] == pytest.approx((span.start_s, span.end_s))


EMPTY, NO_TIME = '{"traceEvents": []}', '{"traceEvents": [{"ph": "X", "ts": NaN, "dur": 1}]}'


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", EMPTY, '{"traceEvents": [{"ph": "X"}]}', NO_TIME]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=r"t\.json: not (a timeline|JSON)"):
        read_trace(tmp_path / "t.json")


def test_a_timeline_without_spans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without spans"):
        write_trace(tmp_path / "t.json", [])


def test_the_typical_step_is_the_one_of_median_length() -> None:
    lengths = enumerate((3.0, 1.0, 2.0))
    spans = [s for i, length in lengths for r in (0, 1) for s in step(r, 10.0 * i, i, length)]
    typical = Timeline(tuple(spans), ABOUT).typical_step()
    assert typical.about["step"] == "step 2"
    assert set(typical.spans) == {*step(0, 20.0, 2, 2.0), *step(1, 20.0, 2, 2.0)}


def stages() -> Iterator[Completed]:
    yield Completed()
    yield Completed()


@pytest.mark.parametrize("make", [InlineWorker, TurnsWorker, partial(ThreadWorker, CPU)])
def test_an_exchange_is_noted_whatever_worker_runs_it(make: Callable[[], Worker]) -> None:
    clock, worker = Clock(CPU, breakdown=True), make()
    before = time.perf_counter()
    with clock.step():
        for name in ("a", "b"):
            worker.submit(name, clock.traced(name, stages, coded=True))
        worker.wait()
    worker.close()
    spans = clock.spans(rank=3, first_step=7, num_warmup=0)
    whole = next(span for span in spans if span.row == "step")
    assert (whole.rank, whole.name) == (3, "step 7")
    assert before <= whole.start_s <= whole.end_s <= time.perf_counter()
    for name in ("a", "b"):
        (exchange,) = (s for s in spans if (s.row, s.name) == ("exchange", name))
        pieces = [s for s in spans if (s.row, s.name) == ("codec", name)]
        assert whole.start_s <= exchange.start_s <= exchange.end_s <= whole.end_s
        assert len(pieces) == 3  # before, between and after two collectives
        assert (pieces[0].start_s, pieces[-1].end_s) == (exchange.start_s, exchange.end_s)
        assert all(a.end_s <= b.start_s for a, b in pairwise(pieces))


def test_in_line_no_two_exchanges_overlap() -> None:
    clock, worker = Clock(CPU, breakdown=True), InlineWorker()
    with clock.step():
        for name in "abc":
            worker.submit(name, clock.traced(name, stages, coded=False))
    spans = [s for s in clock.spans(0, 0, 0) if s.row != "step"]
    assert [span.name for span in spans] == ["a", "b", "c"]  # and no codec row
    assert {lane for _, lane in lanes(spans)} == {0}


def test_only_the_last_timed_steps_are_kept() -> None:
    clock = Clock(CPU, breakdown=True)
    for _ in range(KEPT_STEPS + 3):
        with clock.step(), clock.phase("update"):
            pass
    names = [s.name for s in clock.spans(0, 0, num_warmup=1) if s.row == "step"]
    assert names == [f"step {3 + i}" for i in range(KEPT_STEPS)]
    assert len(clock.spans(0, 0, num_warmup=KEPT_STEPS + 2)) == 2
    assert {span.row for span in clock.spans(0, 0, 0)} == {"step", "optimizer"}


def test_layers_lie_within_the_passes_of_their_step() -> None:
    clock = Clock(CPU, breakdown=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with marked_layers(model, CPU, lambda: clock.passes):
        for _ in range(2):
            with clock.step():
                with clock.phase("forward"):
                    loss = model(torch.ones(2, 3)).sum()
                with clock.phase("backward"):
                    loss.backward()
            model(torch.ones(2, 3))  # an evaluation is no part of a step
    spans = [span for span in clock.spans(0, 0, num_warmup=1) if span.row != "step"]
    passes, layers = spans[:2], spans[2:]
    assert [layer.name for layer in layers[:2]] == ["0", "2"]
    assert list(dict.fromkeys(layer.name for layer in layers[2:])) == ["2", "0"]
    assert {layer.row for layer in layers} == {"layer"}
    assert all(before.end_s == after.start_s for before, after in pairwise(layers))
    assert passes[0].start_s <= layers[0].start_s
    assert layers[1].end_s <= passes[0].end_s
    assert layers[-1].end_s <= passes[1].end_s
    left = len(clock.passes)
    model(torch.ones(2, 3)).sum().backward()
    assert len(clock.passes) == left  # no hook is


def test_a_throughput_run_notes_nothing() -> None:
    clock = Clock(CPU, breakdown=False)
    with clock.step():
        assert len(list(clock.traced("a", stages, coded=True)())) == 2
    assert clock.spans(0, 0, 0) == []


KINDS = ("", " transfers", " transfers 2")


def test_the_figure_names_ranks_and_buckets_and_says_what_is_emulated() -> None:
    spans = tuple(span for rank in range(10) for span in step(rank, 0.0))
    chart = timeline_of_step(Timeline(spans, {**ABOUT, "emulation": "10 ranks share 2 cores"}))
    assert chart.message == "A step of overlap on 2 ranks: 1000 ms, of which 10 % is waiting"
    alone = timeline_of_step(Timeline(tuple(step(0, 0.0)), {**ABOUT, "world_size": 1}))
    assert alone.message.startswith("A step of overlap on 1 rank: ")
    assert "Pale: emulated (10 ranks share 2 cores)." in chart.about
    assert "The first 8 of 10 ranks." in chart.about
    svg = drawn(chart.spec(), "svg").decode()
    assert overlapping(svg) == outside(svg) == []
    texts = [box.text for box in boxes_of(svg)]
    names = [f"rank {rank}{kind}" for rank in range(8) for kind in KINDS]
    assert [text for text in texts if text in names] == names
    assert {"Forward", "Backward", "fc.weight and 1 more", "conv.weight"} <= set(texts)


def test_plot_draws_a_cell(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{}")
    why = "and there is no timeline.json, which only runs with measure=breakdown write"
    assert why in refusal(plot, str(tmp_path))
    write_trace(tmp_path / "timeline.json", [*step(0, 0.0), *step(1, 0.1)], ABOUT)
    assert plot([str(tmp_path), "format=svg"]) == 0
    texts = {box.text for box in boxes_of((tmp_path / "figures" / "timeline.svg").read_text())}
    assert {"rank 0", "rank 1 transfers", "Forward", "Transfer", "Update"} <= texts
