"""Checkpointing: the same step, with activations computed twice."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from lab.transform.transforms import Checkpoint


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)))


def test_gradients_are_the_same_to_the_bit() -> None:
    model, inputs = blocks(), torch.randn(4, 8)
    other = Checkpoint(r"[01]")(deepcopy(model))
    assert list(other.state_dict()) == list(model.state_dict())
    for each in (model, other):
        torch.manual_seed(1)
        each(inputs).square().sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_forward_runs_twice_where_it_is_asked() -> None:
    model = blocks()
    calls = [0, 0, 0]

    def count(place: int) -> None:
        calls[place] += 1

    for place in range(len(calls)):
        first = model.get_submodule(f"{place}.0")
        first.register_forward_hook(lambda *_, place=place: count(place))
    Checkpoint("1")(model)(torch.randn(2, 8)).sum().backward()
    assert calls == [1, 2, 1]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (None, "transform.modules=null: must be a regular expression"),
        ("[", r"transform.modules=\[: unterminated"),
        ("block", "transform.modules=block: matches none of 9 modules: 0, 0.0, 0.1"),
    ],
)
def test_wrong_modules_are_named(modules: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoint(modules)(blocks())
