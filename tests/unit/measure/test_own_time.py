"""Own times of steps whose marks are given: by the host's clock, and on a fake one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lab.distributed.collective import Done
from lab.measure import clock as clocks
from lab.measure.clock import KEPT_STEPS, Clock
from lab.measure.spans import OWN

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
    monkeypatch.setattr(clocks, "marker", lambda _device: lambda: made.now)
    return made


def own(clock: Clock) -> dict[str, float]:
    """The own times of the first step."""
    return dict(zip(OWN, clock.own_times().own_seconds()[0], strict=True))


def a_step(clock: Clock, host: Host, tail: float = 0.0) -> None:
    """Work 1 s on data, 2 forward, 4 backward and 8 on an exchange, which also waits for 16 s.

    Half of the exchange's work lies within backward.
    """
    waited = [0.0]

    def job() -> Iterator[Done]:
        host.work(4)
        yield Done()
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
