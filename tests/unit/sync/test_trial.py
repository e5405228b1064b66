"""Trial: which steps of two schedules count, and which schedule is kept."""

from __future__ import annotations

import pytest
import torch

from lab.sync import priority as trial
from lab.sync.priority import COLD, Trial

PLANNED, CPU = 1, torch.device("cpu")


class Clock:
    """A clock that stands until a step moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(trial, "mark", lambda _device: self.now)


def test_first_steps_of_each_row_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tried, rows = Clock(monkeypatch), Trial(2, CPU), list[bool]()
    rows_s = [(False, [9.0] * (PLANNED + COLD)), (True, [9.0] * COLD)]
    rows_s += [(False, [9.0, 1.0, 3.0]), (True, [9.0, 1.0, 1.0])]
    costs = None
    for second, times in rows_s:
        for time in times:
            assert costs is None
            rows.append(tried.second == second)
            clock.now += time
            costs = tried.end_step()
    assert all(rows)
    assert costs == [2.0, 1.0]


def test_a_step_in_which_other_work_ran_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tried = Clock(monkeypatch), Trial(1, CPU)
    num_steps = 0
    while (costs := tried.end_step()) is None:
        num_steps += 1
        clock.now += 2.0 if tried.second else 1.0
        if num_steps == PLANNED + COLD + COLD + 1:  # next is the first that counts
            clock.now += 100.0  # an evaluation
            tried.interrupt()
    assert costs == [1.0, 2.0]


@pytest.mark.parametrize(("costs", "second"), [([1.0, 0.99], False), ([1.0, 0.97], True)])
def test_the_second_has_to_gain_more_than_noise(costs: list[float], second: bool) -> None:
    tried = Trial(3, CPU)
    tried.costs = costs
    assert tried.second == second
