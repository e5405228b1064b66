"""Counts from shapes agree with torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lab.model.alexnet import alexnet
from lab.model.facts import Convolution
from lab.model.lenet import lenet


def convolutions(model: nn.Module, images: Tensor) -> list[Convolution]:
    """Return the shape of each convolution of the model for `images`."""
    shapes: list[Convolution] = []

    def note(layer: nn.Module, _inputs: object, output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        height, width = output.shape[2:]
        channels, kernel = (layer.in_channels, layer.out_channels), layer.kernel_size
        shapes.append(Convolution(*channels, height, width, *kernel, groups=layer.groups))

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(note)
    model(images)
    return shapes


def grouped(**_shape: object) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, (3, 5), groups=2), nn.Conv2d(6, 3, 1))


@pytest.mark.parametrize(
    ("make", "input_shape"), [(alexnet, (3, 224, 224)), (lenet, (1, 28, 28)), (grouped, (4, 9, 9))]
)
def test_operations_of_convolutions_are_those_torch_counts(
    make: Callable[..., nn.Module], input_shape: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        model, images = make(input_shape=input_shape, output_size=10), torch.empty(2, *input_shape)
    with FlopCounterMode(display=False) as counter:
        counted = convolutions(model, images)
    (by_torch,) = [
        count
        for operator, count in counter.get_flop_counts()["Global"].items()
        if "convolution" in str(operator)
    ]
    assert counted and 2 * sum(each.operations for each in counted) == by_torch
