"""FC layers as convolutions, the same function or a smaller head; activations computed twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lab.model.alexnet import alexnet, alexnet_small
from lab.model.convnet import ConvNet, lenet
from lab.model.mlp import mlp
from lab.transform.transforms import Checkpoint, Fc1x1

SMALL = partial(alexnet_small, hidden=64)
MODELS = pytest.mark.parametrize("make", [lenet, SMALL], ids=["lenet", "alexnet_small"])


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@MODELS
def test_equivalent_gives_the_same_outputs_and_gradients(make: Callable[..., ConvNet]) -> None:
    torch.manual_seed(0)
    model = make(input_shape=(1, 32, 32), output_size=10)
    images, labels = torch.randn(4, 1, 32, 32), torch.arange(4)
    other = Fc1x1(mode="equivalent")(copy.deepcopy(model))
    assert size(other) == size(model)
    assert not any(isinstance(layer, nn.Linear) for layer in other.modules())
    torch.testing.assert_close(other(images), model(images), rtol=1e-5, atol=1e-5)
    for each in (model, other):
        nn.functional.cross_entropy(each(images), labels).backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad.view_as(a), a.grad, rtol=1e-5, atol=1e-5)


def test_substitution_makes_the_head_of_alexnet_25_times_smaller() -> None:
    with torch.device("meta"):
        model = alexnet(input_shape=(3, 224, 224), output_size=1000)
        other = Fc1x1()(model)
    assert size(other.classifier) == 256 * 1024 + 1024 * 1024 + 1024 * 1000 + 2 * 1024 + 1000
    assert size(model.classifier) / size(other.classifier) == pytest.approx(25.1, abs=0.1)
    assert size(other.features) == size(model.features)


def test_substitution_keeps_dropout_and_pools_last() -> None:
    model = alexnet_small(input_shape=(1, 8, 8), output_size=2, hidden=8, dropout=0.5)
    head = Fc1x1(width_divisor=3)(model).classifier
    names = [type(layer).__name__ for layer in head]
    assert names == [*["Dropout", "Conv2d", "ReLU"] * 2, "Conv2d", "AdaptiveAvgPool2d", "Flatten"]
    assert [layer.out_channels for layer in head if isinstance(layer, nn.Conv2d)] == [2, 2, 2]


@MODELS
def test_substitution_averages_over_positions(make: Callable[..., ConvNet]) -> None:
    other = Fc1x1()(make(input_shape=(3, 32, 32), output_size=10))
    _, height, width = other.feature_shape
    features = torch.randn(2, *other.feature_shape)
    by_hand = sum(
        other.classifier(features[:, :, y : y + 1, x : x + 1])
        for y in range(height)
        for x in range(width)
    )
    torch.testing.assert_close(other.classifier(features), by_hand / (height * width))
    assert other(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("mode", ["substitution", "equivalent"])
def test_the_given_model_stays_as_it_was(mode: str) -> None:
    model = lenet(input_shape=(1, 16, 16), output_size=3)
    before = copy.deepcopy(model.state_dict())
    Fc1x1(mode=mode)(model)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_refuses_a_model_without_such_a_head() -> None:
    with pytest.raises(ValueError, match="Sequential has no FC head.*use model=lenet") as one:
        Fc1x1()(mlp(input_shape=(1, 8, 8), output_size=2))
    assert "\n" not in str(one.value)
    twice = Fc1x1()(lenet(input_shape=(1, 16, 16), output_size=2))
    with pytest.raises(ValueError, match="no FC head"):
        Fc1x1()(twice)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "nin"}, "transform.mode=nin: allowed: substitution, equivalent"),
        ({"width_divisor": 0}, "transform.width_divisor=0: must be an integer of at least 1"),
    ],
)
def test_refuses_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Fc1x1(**arguments)
    assert str(caught.value) == message


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
        ("[", r"transform.modules=\[: not a regular expression: unterminated"),
        ("block", "transform.modules=block matches none of the model's 9 modules: 0, 0.0, 0.1"),
    ],
)
def test_wrong_modules_are_named(modules: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoint(modules)(blocks())
