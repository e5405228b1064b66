"""0/1 Adam against Adam with the same variance, and against arithmetic."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.exchange.onebit_adam import IntervalSchedule, ZeroOneAdam
from tests.support.directions import deliver
from tests.unit.exchange.test_onebit_adam import NUM, SHAPES, gradients

EACH = 4  # with intervals of 1, 2 and 4 steps: exact are 1 to 4, 6 to 12 by 2s, 16 to 28 by 4s
LAST = 28


def make(**settings: Any) -> partial[ZeroOneAdam]:
    given = {"block_size": 64, "updates_per_interval": EACH, "longest_interval": 4}
    return partial(ZeroOneAdam, **{**given, **settings})


def test_intervals_double_after_as_many_steps_and_end() -> None:
    doubling = IntervalSchedule(EACH, 4)
    due = [step for step in range(1, 60) if doubling.is_due(step)]
    assert due == [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28]
    assert [doubling.num_due(step) for step in due] == list(range(1, 13))
    assert doubling.num_due(7) == 5
    assert doubling.num_due(99) == 12
    assert [step for step in range(1, 60) if doubling.is_first(step)] == [5, 13, 29]


@pytest.mark.parametrize("later", [0.0, 1e-6])
def test_values_without_any_gradient_are_not_divided_by_nothing(later: float) -> None:
    given = gradients(LAST + 5, 2)
    given[:, :, 7:1200:50] *= later  # a column; signs say something of it, as its rows have some
    given[: EACH + 1, :, 7:1200:50] = 0
    directions = deliver(make(), SHAPES, given)[0].directions
    assert directions[EACH:, 7].any()
    assert directions.abs().max() < 10


def owed(states: list[dict[str, Any]]) -> Tensor:
    """Return what both residuals hold back, as a sum of gradients: float64 [values]."""
    found: list[Tensor] = []
    for name in SHAPES:
        active, root = states[0]["active"][name], states[0]["root"][name].double()
        held = torch.cat([state["shard_residual"][name] for state in states]).double()
        for state in states:
            held += state["residual"][name].double()
        rows = torch.zeros(len(active), len(root) // len(active), dtype=torch.float64)
        rows[active] = held.view(-1, rows.shape[1])
        found.append(rows.flatten() * root)
    return torch.cat(found)


@pytest.mark.parametrize("size", [1, 3])
def test_delivered_and_residuals_make_the_true_sum(size: int) -> None:
    given = gradients(LAST + 5, size)
    given[:9, :, -64:] = 0  # rows that begin in step 10; signs travel in step 11, and again from 13
    truth, moments = torch.zeros(NUM, dtype=torch.float64), list[Tensor]()
    states, choice = list[dict[str, Any]](), dict[str, Any]()
    for step, gradient in enumerate(given):
        ledgers = deliver(make(), SHAPES, gradient[None], states, step)
        states = [ledger.exchange.state_dict() for ledger in ledgers]
        (choice,) = ledgers[0].exchange.choices()
        moments.append(torch.cat([states[0]["momentum"][name] for name in SHAPES]).double())
        truth += gradient.double().mean(dim=0)
        if step == 10:
            truth[-64:] -= gradient.double().mean(dim=0)[-64:]
        if step >= EACH:
            delivered = torch.stack(moments).sum(dim=0) + 9 * moments[-1]  # undoes momentum
            assert (delivered + owed(states) - truth).norm() <= 1e-5 * truth.norm()
    assert owed(states).norm() > 0.01 * truth.norm()
    assert choice["frozen_at"] == LAST
    assert choice["variance_updates"] == 3 * EACH
    assert (choice["silent_rows"], choice["late_rows"]) == (0, 2)


def test_other_numbers_of_ranks_keep_sums() -> None:
    states: list[dict[str, Any]] = [
        ledger.exchange.state_dict() for ledger in deliver(make(), SHAPES, gradients(11, 4))
    ]
    for old, size in pairwise((4, 2, 3)):
        assert len(states) == old
        new = [make()().redistribute(states, rank, size) for rank in range(size)]
        torch.testing.assert_close(owed(new), owed(states), rtol=1e-5, atol=1e-6)
        for kind in ("momentum", "root", "variance"):
            assert new[-1][kind].keys() == states[0][kind].keys()
        first = int(states[0]["counts"]["updates"])
        ledgers = deliver(make(), SHAPES, gradients(7, size), new, first)
        states = [ledger.exchange.state_dict() for ledger in ledgers]
