"""The learning rate over time, and clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lab.training.optim import Optim, clip_gradients


def optim(**changes: Any) -> Optim:
    settings = {
        "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False, "schedule": "cosine",
        "warmup_steps": 4, "linear_scaling": False, "base_batch_size": 128, "batch_size": 512,
    }  # fmt: skip
    return Optim(**{**settings, **changes})


def test_warm_up_is_linear_and_cosine_ends_at_zero() -> None:
    rates = [optim().lr_at(step, total_steps=104) for step in range(105)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.05)
    assert rates[104] == pytest.approx(0.0)


def test_constant_stays_and_linear_scaling_multiplies() -> None:
    assert optim(schedule="constant").lr_at(90, total_steps=104) == 0.1
    assert optim(linear_scaling=True).peak_lr == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("schedule", "step", "optim.schedule=step: allowed are constant, cosine"),
        ("lr", -0.1, "optim.lr=-0.1: must be a number of at least 0"),
        ("lr", "fast", "optim.lr=fast"),
        ("momentum", float("nan"), "optim.momentum=nan"),
        ("base_batch_size", 0, "optim.base_batch_size=0: must be an integer of at least 1"),
        ("warmup_steps", -1, "optim.warmup_steps=-1: must be an integer of at least 0"),
        ("nesterov", "maybe", "optim.nesterov=maybe: must be true or false"),
    ],
)
def test_wrong_settings_are_named(setting: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim(**{setting: value})


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValueError, match=r"optim.nesterov=true: needs optim.momentum above 0"):
        optim(nesterov=True, momentum=0.0)


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
