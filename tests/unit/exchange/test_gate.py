"""Who is told of updates, and which exchange a parameter belongs to."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lab.exchange.gate import BEFORE_UPDATES, Outside


class Watching:
    """Counts optimizers' steps, and lets others go in each."""

    def __init__(self, *others: Watching) -> None:
        self.others, self.num_steps = [*others], 0
        BEFORE_UPDATES.add(self.note)

    def note(self, *_: object) -> None:
        self.num_steps += 1
        self.others.clear()
        gc.collect()


def test_others_may_be_gone_in_the_middle_of_an_update() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    first = Watching(Watching(), Watching())
    steps: list[int] = []
    hook = register_optimizer_step_pre_hook(lambda *_: steps.append(1))  # torch calls it last
    optimizer.step()
    BEFORE_UPDATES.remove(first.note)
    optimizer.step()
    hook.remove()
    assert first.num_steps == 1
    assert len(steps) == 2


def test_a_later_exchange_of_a_parameter_replaces_the_one_before() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    head = dict(model[1].named_parameters())
    first, other = Outside(model, head), Outside(nn.Linear(2, 2), {})
    assert not first.is_replaced
    later = Outside(model, dict(model.named_parameters()))
    assert first.is_replaced
    assert not later.is_replaced
    assert not other.is_replaced
