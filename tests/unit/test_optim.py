"""The learning rate over time."""

from __future__ import annotations

from typing import Any

import pytest

from lab.optim import Optim


def optim(**changes: Any) -> Optim:
    settings = {
        "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False, "schedule": "cosine",
        "warmup_steps": 4, "linear_scaling": False, "base_batch_size": 128, "batch_size": 512,
        "total_steps": 104,
    }  # fmt: skip
    return Optim(**{**settings, **changes})


def test_warm_up_is_linear_and_cosine_ends_at_zero() -> None:
    rates = [optim().lr_at(step) for step in range(105)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.05)
    assert rates[104] == pytest.approx(0.0)


def test_constant_stays_and_linear_scaling_multiplies() -> None:
    assert optim(schedule="constant").lr_at(90) == 0.1
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
