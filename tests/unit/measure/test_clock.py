"""The clock on a fake GPU: the events that it keeps, and their seconds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lab.measure.clock import KEPT_STEPS, Clock
from lab.measure.statistics import wall_seconds


class Device:
    """A GPU some steps behind the host. Every mark is a second after the one before."""

    def __init__(self, lag: int) -> None:
        self.lag, self.num_marks, self.reached = lag, 0, 0
        self.alive: weakref.WeakSet[Event] = weakref.WeakSet()

    def synchronize(self, _device: torch.device) -> None:
        self.reached = self.num_marks


class Event:
    device: Device  # set by the test

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.device.alive.add(self)

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


@pytest.mark.parametrize("breakdown", [False, True])
@pytest.mark.parametrize("lag", [0, 40])
def test_a_long_run_keeps_few_marks_and_all_seconds(
    gpu: Callable[[int], Device], breakdown: bool, lag: int
) -> None:
    device, clock, most = gpu(lag), Clock(torch.device("cuda"), breakdown), 0
    for number in range(5000):
        with clock.step():
            for _ in range(number % 3):
                with clock.phase("forward"):
                    pass
        most = max(most, len(device.alive))
    gc.collect()
    assert most <= 7 * (KEPT_STEPS + 2) + lag
    lengths = 1 + 2 * (np.arange(5000) % 3)
    assert np.array_equal(clock.step_seconds(), lengths)
    assert clock.total_seconds() == lengths.sum()
    assert np.array_equal(clock.gap_seconds(), [0.0] + [1.0] * 4999)
    forward = clock.phase_seconds()[:, 1]
    expected = np.where(np.arange(5000) % 3, np.arange(5000) % 3, np.nan)
    assert np.array_equal(forward, expected if breakdown else np.full(5000, np.nan), equal_nan=True)


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


@pytest.mark.parametrize("lag", [0, 7, 40])
def test_finished_steps_are_told_as_the_device_passes_them_and_nothing_waits(
    gpu: Callable[[int], Device], lag: int
) -> None:
    device, clock, told = (
        gpu(lag),
        Clock(torch.device("cuda"), breakdown=False),
        list[list[float]](),
    )
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
