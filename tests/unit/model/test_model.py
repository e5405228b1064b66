"""Parameter counts, shares of the head, refused sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lab.model.alexnet import alexnet, alexnet_paper, alexnet_small
from lab.model.convnet import ConvNet
from lab.model.lenet import lenet
from lab.model.mlp import mlp
from lab.settings.config import build, choices_of, load
from tests.support.slow import some_of

LANGUAGE = ("lstm", "transformer")


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", some_of(choices_of("model"), every=3))
def test_every_config_makes_a_model_that_trains(name: str) -> None:
    settings = load([f"model={name}", "profile=alexnet_titanx"])  # only replay reads the profile
    tokens = {"vocabulary": 7} | ({"context": 5} if name == "transformer" else {})
    with torch.device("meta"):  # which computes shapes, and gradients' shapes, alone
        if name in LANGUAGE:
            model, inputs = build(settings.model, **tokens), torch.zeros(2, 5, dtype=torch.int64)
        else:
            model = build(settings.model, input_shape=(3, 96, 96), output_size=7)
            inputs = torch.zeros(2, 3, 96, 96)
        logits = model(inputs)
    assert logits.shape == ((2, 5, 7) if name in LANGUAGE else (2, 7))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_alexnet_has_its_parameters_and_its_share_of_fc() -> None:
    with torch.device("meta"):
        model = alexnet(input_shape=(3, 224, 224), output_size=1000)
    assert model.feature_shape == (256, 6, 6)
    assert size(model) == 61_838_248
    assert size(model.classifier) == 58_631_144
    assert size(model.classifier) / size(model) == pytest.approx(0.948, abs=5e-4)


@pytest.mark.parametrize("pixels", [224, 227])
def test_alexnet_of_the_paper_has_the_parameters_of_slide_8(pixels: int) -> None:
    with torch.device("meta"):
        model = alexnet_paper(input_shape=(3, pixels, pixels), output_size=1000)
        second = model.features[3](model.features[:3](torch.zeros(1, 3, pixels, pixels)))
    assert second.shape == (1, 256, 27, 27)
    assert size(model) == 62_378_344
    assert size(model.classifier) / size(model) == pytest.approx(0.94, abs=5e-4)


def test_alexnet_small_has_the_share_of_fc_of_alexnet() -> None:
    model = alexnet_small(input_shape=(1, 32, 32), output_size=10)
    widths = [layer.out_channels for layer in model.features if isinstance(layer, nn.Conv2d)]
    assert widths == [16, 48, 96, 96, 64]
    assert size(model.classifier) / size(model) == pytest.approx(0.948, abs=5e-4)


def test_lenet_has_its_parameters() -> None:
    model = lenet(input_shape=(1, 28, 28), output_size=10)
    assert model.feature_shape == (50, 4, 4)
    assert size(model) == 520 + 25_050 + 400_500 + 5_010  # as in Caffe's MNIST example


def test_mlp_has_its_parameters() -> None:
    assert size(mlp(input_shape=(1, 4, 4), output_size=3, hidden=[5])) == 17 * 5 + 6 * 3
    assert size(mlp(input_shape=(1, 4, 4), output_size=3, hidden=[])) == 17 * 3


def test_dropout_stands_before_the_hidden_fc_layers_alone() -> None:
    def names(dropout: float) -> list[str]:
        model = alexnet_small(input_shape=(1, 8, 8), output_size=2, hidden=4, dropout=dropout)
        return [type(layer).__name__ for layer in model.classifier]

    assert names(0.0) == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert names(0.5) == ["Flatten", *["Dropout", "Linear", "ReLU"] * 2, "Linear"]


def test_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        model = lenet(input_shape=(1, 16, 16), output_size=2)
        return nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


@pytest.mark.parametrize(("model", "smallest"), [(lenet, 16), (alexnet, 63), (alexnet_small, 8)])
def test_images_may_be_as_small_as_is_said(model: Callable[..., ConvNet], smallest: int) -> None:
    with torch.device("meta"):
        made = model(input_shape=(1, smallest, smallest + 5), output_size=2)
    assert min(made.feature_shape) >= 1
    with pytest.raises(ValueError) as caught:
        model(input_shape=(1, smallest + 5, smallest - 1), output_size=2)
    assert str(caught.value) == (
        f"model={model.__name__}: images of {smallest + 5}x{smallest - 1} px are too small, it "
        f"needs at least {smallest} px; set data.size={smallest} or more (data.shape for "
        "data=synthetic)"
    )


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (mlp, {"hidden": [5, 0]}, "model.hidden=[5, 0]: must be a list of integers"),
        (mlp, {"hidden": 5}, "model.hidden=5: must be a list of integers"),
        (mlp, {"hidden": "5"}, "model.hidden=5: must be a list of integers"),
        (alexnet, {"dropout": 1.0}, "model.dropout=1.0: must be a number from 0 to below 1"),
        (alexnet_small, {"width": 0}, "model.width=0: must be an integer of at least 1"),
        (alexnet_small, {"hidden": 1.5}, "model.hidden=1.5: must be an integer of at least 1"),
        (alexnet_small, {"dropout": "a"}, "model.dropout=a: must be a number from 0 to below 1"),
    ],
)
def test_refuses_in_one_line(
    model: Callable[..., nn.Module], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        model(input_shape=(1, 64, 64), output_size=2, **arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
