"""The clock on a fake GPU: the events that it keeps, their seconds, and a rank's own times."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lab.distributed.comm import Completed
from lab.measure import OWN
from lab.measure import clock as clocks
from lab.measure.clock import KEPT_STEPS, Clock
from lab.measure.statistics import wall_seconds


class Device:
    """A GPU some steps behind the host. Every mark is a second after the one before."""

    def __init__(self, lag: int) -> None:
        self.lag, self.num_marks, self.reached = lag, 0, 0
        self.num_made = 0
        self.alive: weakref.WeakSet[Event] = weakref.WeakSet()

    def synchronize(self, _device: torch.device) -> None:
        self.reached = self.num_marks


class Event:
    device: Device  # set by the test

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.device.alive.add(self)
        self.device.num_made += 1

    def record(self) -> None:
        self.device.num_marks += 1
        self.second = self.device.num_marks
        self.device.reached = max(self.device.reached, self.second - self.device.lag)

    def query(self) -> bool:
        return self.second <= self.device.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "the device has not come that far"
        return float(np.float32(1000 * (end.second - self.second)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Device]:
    def make(lag: int) -> Device:
        Event.device = Device(lag)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", Event.device.synchronize)
        return Event.device

    return make


@pytest.mark.parametrize(("lag", "breakdown"), [(0, False), (40, True)])
def test_a_long_run_keeps_few_marks_and_all_seconds(
    gpu: Callable[[int], Device], lag: int, breakdown: bool
) -> None:
    device, clock, most = gpu(lag), Clock(torch.device("cuda"), breakdown), 0
    for number in range(2500):
        with clock.step():
            for _ in range(number % 3):
                with clock.phase("forward"):
                    pass
        most = max(most, len(device.alive))
    gc.collect()
    assert most <= 7 * (KEPT_STEPS + 2) + lag
    assert device.num_made <= 7 * (KEPT_STEPS + 2) + lag < device.num_marks / 100
    lengths = 1 + 2 * (np.arange(2500) % 3)
    assert np.array_equal(clock.step_seconds(), lengths)
    assert clock.total_seconds() == lengths.sum()
    assert np.array_equal(clock.gap_seconds(), [0.0] + [1.0] * 2499)
    forward = clock.phase_seconds()[:, 1]
    expected = np.where(np.arange(2500) % 3, np.arange(2500) % 3, np.nan)
    assert np.array_equal(forward, expected if breakdown else np.full(2500, np.nan), equal_nan=True)


def test_a_pause_is_in_no_gap_and_spans_are_told_from_where_it_begins(
    gpu: Callable[[int], Device],
) -> None:
    device, clock = gpu(0), Clock(torch.device("cuda"), breakdown=True)
    for _ in range(2):
        for _ in range(KEPT_STEPS + 1):
            with clock.step():
                pass
        clock.pause()
        device.num_marks += 2**30  # an evaluation; milliseconds are coarse in float32 after it
        device.reached = device.num_marks
    assert clock.gap_seconds().tolist() == ([0.0] + [1.0] * KEPT_STEPS) * 2
    spans = clock.spans(rank=0, first_step=0, num_warmup=0)
    assert len(spans) == KEPT_STEPS
    assert {round(span.end_s - span.start_s, 6) for span in spans} == {1.0}


@pytest.mark.parametrize("lag", [0, 7])
def test_finished_steps_are_told_as_the_device_passes_them_and_nothing_waits(
    gpu: Callable[[int], Device], lag: int
) -> None:
    device, clock = gpu(lag), Clock(torch.device("cuda"), breakdown=False)
    told = list[list[float]]()
    for _ in range(50):
        with clock.step():
            pass
        before = device.reached
        told += clock.finished(len(told))
        assert device.reached == before
        assert len(told) == device.reached // 2  # each step has two marks
    device.synchronize(torch.device("cuda"))
    told += clock.finished(len(told))
    assert told == [[1.0, 0.0], *[[1.0, 1.0]] * 49]
    assert clock.finished(50) == []


def test_wall_time_counts_what_lies_between_steps() -> None:
    step_s = np.array([[9.0, 2.0, 2.0, 2.0], [9.0, 1.0, 3.0, 1.0]])
    gap_s = np.array([[0.0, 5.0, 0.5, 0.0], [0.0, 5.0, 1.0, 1.0]])
    assert wall_seconds(step_s[:, 1:], gap_s[:, 1:]) == 7.0  # the second rank's
    assert wall_seconds(step_s[:, 4:], gap_s[:, 4:]) == 0.0


def test_a_phase_within_another_interrupts_it(gpu: Callable[[int], Device]) -> None:
    gpu(0)
    clock = Clock(torch.device("cuda"), breakdown=True)
    with clock.step(), clock.phase("forward"), clock.phase("exchange", "of layer 1"):
        pass
    forward_s, exchange_s = clock.phase_seconds()[0, 1:4:2]
    assert (forward_s, exchange_s) == (2, 1)  # a second from each mark to the next
    names = [(span.row, span.name) for span in clock.spans(0, 0, 0)]
    assert names == [
        ("step", "step 0"),
        ("forward", "forward"),
        ("forward", "forward"),
        ("wait", "of layer 1"),
    ]


def test_overtime_counts_towards_the_step_that_left_it(gpu: Callable[[int], Device]) -> None:
    gpu(0)
    clock = Clock(torch.device("cuda"), breakdown=False)
    for _ in range(2):
        with clock.step():
            pass
    with clock.overtime():
        pass
    assert clock.step_seconds().tolist() == [1, 2]
    assert clock.total_seconds() == 3
    assert clock.gap_seconds().tolist() == [0, 1]


CPU = torch.device("cpu")


class Host:
    """A host's clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def own(clock: Clock) -> dict[str, float]:
    """The own times of the first step."""
    return dict(zip(OWN, clock.own_times().own_seconds()[0], strict=True))


def a_step(clock: Clock, host: Host, tail: float = 0.0) -> None:
    """Work 1 s on data, 2 forward, 4 backward and 8 on an exchange, which also waits for 16 s.

    Half of the exchange's work lies within backward.
    """
    waited = [0.0]

    def job() -> Iterator[Completed]:
        host.work(4)
        yield Completed()
        host.work(10)
        waited[0] += 8  # a wait within a stage, 2 s of it are work
        host.work(2)

    with clock.step():
        with clock.phase("data"):
            host.work(1)
        with clock.phase("forward"):
            host.work(2)
        with clock.phase("backward"):
            host.work(4)
            clock.ready(0)
            stages = clock.traced("fc", job, False, lambda: waited[0], in_line=True)()
            next(stages)
            host.work(tail)
        with clock.phase("exchange"):
            clock.ready(0)  # counts no more
            host.work(8)
            assert list(stages) == []
        with clock.phase("update"):
            host.work(3)


def test_work_is_told_from_waits(host: Host) -> None:
    clock = Clock(CPU, breakdown=False)
    a_step(clock, host)
    expected = {"input": 1, "forward": 2, "backward": 4, "exchange": 8, "update": 3}
    assert own(clock) == {"between": 0, **expected}
    assert clock.own_times().ready_seconds().tolist() == [[7.0]]


def test_ddp_waits_within_backward_once_the_last_gradient_is_ready(host: Host) -> None:
    clock = Clock(CPU, breakdown=True, waits_in=("backward", "forward"))
    a_step(clock, host, tail=50.0)
    assert own(clock)["backward"] == 4
    assert math.isnan(own(clock)["forward"])  # it sends buffers there
    assert clock.phase_seconds()[0, 2] == 58
    unmarked = Clock(CPU, breakdown=False, waits_in=("backward",))
    with unmarked.step(), unmarked.phase("backward"):
        host.work(5)
    assert math.isnan(own(unmarked)["backward"])


def test_a_forward_that_waits_and_works_on_an_exchange_is_charged_with_neither(host: Host) -> None:
    clock = Clock(CPU, breakdown=False)
    with clock.step(), clock.phase("forward"):
        host.work(1)
        with clock.phase("exchange"):
            host.work(50)
        with clock.phase("update"):
            host.work(3)
        with clock.exchange_work():
            host.work(7)
        host.work(1)
    assert {name: own(clock)[name] for name in ("forward", "exchange", "update")} == {
        "forward": 2,
        "exchange": 7,
        "update": 3,
    }


def test_micro_batches_add_up_and_gaps_are_between_steps(host: Host) -> None:
    clock = Clock(CPU, breakdown=False)
    for _ in range(KEPT_STEPS + 3):
        host.work(0.5)
        with clock.step():
            for _ in range(2):
                with clock.phase("backward"):
                    host.work(2)
    table = clock.own_times().own_seconds()
    assert table.shape == (KEPT_STEPS + 3, len(OWN))
    assert table[:, 0].tolist() == [0.0, *[0.5] * (KEPT_STEPS + 2)]
    assert np.array_equal(table[:, 3], [4.0] * (KEPT_STEPS + 3))
    assert np.isnan(table[:, 4]).all()  # nothing was exchanged
    assert clock.own_times().ready_seconds().shape == (KEPT_STEPS + 3, 0)


def test_buckets_may_change_after_the_first_step(host: Host) -> None:
    clock = Clock(CPU, breakdown=False)
    for buckets in ((0,), (1, 0)):
        with clock.step():
            for bucket in buckets:
                host.work(1)
                clock.ready(bucket)
    ready = clock.own_times().ready_seconds()
    assert np.array_equal(ready, [[1.0, np.nan], [2.0, 1.0]], equal_nan=True)


def test_without_own_marks_nothing_is_known(host: Host) -> None:
    clock = Clock(CPU, breakdown=False, own=False)
    a_step(clock, host)
    assert np.isnan(clock.own_times().own_seconds()[0, 1:]).all()
    assert clock.step_seconds().tolist() == [34.0]
