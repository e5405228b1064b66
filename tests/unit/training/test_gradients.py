"""Clipping."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lab.training.trainer import clip_gradients


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clipping_is_torchs(max_norm: float) -> None:
    ours, theirs = (nn.Linear(4, 3) for _ in range(2))
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        parameter.grad = torch.randn_like(parameter)
        other.grad = parameter.grad.clone()
    clip_gradients(ours, max_norm)
    nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_clipping_spreads_nothing_that_is_not_finite(bad: float) -> None:
    model = nn.Linear(4, 3)
    model.weight.grad, model.bias.grad = torch.ones(3, 4), torch.ones(3)
    model.bias.grad[1] = bad
    clip_gradients(model, 1.0)
    assert model.weight.grad.isfinite().all()
    assert not model.bias.grad.isfinite().all()


def test_a_rank_without_gradients_has_nothing_to_clip() -> None:
    clip_gradients(nn.Linear(4, 3), 1.0)
