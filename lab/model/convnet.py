"""ConvNet: convolution features under a fully connected (FC) head, and helpers to build it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """A head over convolution features, separate so that a transform can replace the head.

    Args:
        features: [batch, *input_shape] -> [batch, *feature_shape].
        classifier: [batch, *feature_shape] -> [batch, output_size].
        feature_shape: (C, H, W) of the features' output.
    """

    def __init__(
        self,
        features: nn.Sequential,
        classifier: nn.Sequential,
        feature_shape: tuple[int, int, int],
    ) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        self.feature_shape = feature_shape

    def forward(self, images: Tensor) -> Tensor:
        """Map images [batch, C, H, W] to outputs [batch, output_size]."""
        return self.classifier(self.features(images))


def with_fc_head(
    features: nn.Sequential,
    input_shape: Sequence[int],
    hidden: Sequence[int],
    output_size: int,
    dropout: float = 0.0,
) -> ConvNet:
    """Put `features` under FC layers of widths `hidden`, each with dropout before it and a ReLU.

    Args:
        features: convolutions and pooling.
        input_shape: (C, H, W) of an image.
        hidden: widths of the hidden layers.
        output_size: width of the last layer.
        dropout: probability that an input of a hidden layer is dropped; 0 adds no such layer.
    """
    shape = output_shape(features, input_shape)
    head: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for hidden_width in hidden:
        if dropout:
            head.append(nn.Dropout(dropout))
        head += [nn.Linear(width, hidden_width), nn.ReLU()]
        width = hidden_width
    head.append(nn.Linear(width, output_size))
    return ConvNet(features, nn.Sequential(*head), shape)


def initialise_for_relu(module: nn.Module) -> None:
    """Draw weights so that ReLU layers keep the variance of their inputs.

    He et al. 2015, section 2.2 (fan-in); biases are zero. PyTorch's default shrinks the signal
    layer by layer, and a stack as deep as AlexNet's then hardly begins to learn without BatchNorm.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def output_shape(features: nn.Sequential, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (C, H, W) of the output for one image, without computing it."""
    image = torch.empty(1, *input_shape, device="meta")
    _, channels, height, width = copy.deepcopy(features).to("meta")(image).shape
    return channels, height, width


def require_size(model: str, input_shape: Sequence[int], smallest: int) -> None:
    """Refuse inputs that are not images, or that pooling would shrink to nothing.

    Raises:
        ValueError: not three dimensions, or height or width is below `smallest` pixels.
    """
    if len(input_shape) != 3:
        raise ValueError(
            f"model={model}: inputs of shape {list(input_shape)} are not images; it needs "
            "[channels, height, width]"
        )
    _, height, width = input_shape
    if min(height, width) < smallest:
        raise ValueError(
            f"model={model}: images of {height}x{width} px are too small, it needs at least "
            f"{smallest} px; set data.size={smallest} or more (data.shape for data=synthetic)"
        )


def require_width(key: str, value: object) -> None:
    """Refuse a value that cannot be the width of a layer.

    Raises:
        ValueError: not an integer of at least 1.
    """
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={value}: must be an integer of at least 1")


def require_dropout(dropout: object) -> None:
    """Refuse a value that is not a dropout probability.

    Raises:
        ValueError: not a number in [0, 1).
    """
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"model.dropout={dropout}: must be a number from 0 to below 1")
