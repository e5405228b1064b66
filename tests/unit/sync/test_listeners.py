"""Who is told of updates."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lab.sync.base import BEFORE_UPDATES


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
