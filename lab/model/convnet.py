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
    dropout_after: bool = False,
) -> ConvNet:
    """Put `features` under FC layers of widths `hidden`, each with dropout and a ReLU.

    Args:
        features: convolutions and pooling.
        input_shape: (C, H, W) of an image.
        hidden: widths of the hidden layers.
        output_size: width of the last layer.
        dropout: probability that an input of a hidden layer is dropped; 0 adds no such layer.
        dropout_after: drop outputs of a hidden layer instead of inputs.
    """
    shape = output_shape(features, input_shape)
    head: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for hidden_width in hidden:
        if dropout and not dropout_after:
            head.append(nn.Dropout(dropout))
        head += [nn.Linear(width, hidden_width), nn.ReLU()]
        if dropout and dropout_after:
            head.append(nn.Dropout(dropout))
        width = hidden_width
    head.append(nn.Linear(width, output_size))
    return ConvNet(features, nn.Sequential(*head), shape)


def initialise_for_relu(module: nn.Module, *, small_outputs: bool = False) -> None:
    """Draw weights so that ReLU layers keep the variance of their inputs.

    He et al. 2015, section 2.2 (fan-in); biases are zero. PyTorch's default shrinks the signal
    layer by layer, and a stack as deep as AlexNet's then hardly begins to learn without BatchNorm.

    Args:
        module: its convolutions and FC layers get new weights.
        small_outputs: draw those of the last FC layer from N(0, 0.01) instead (Goyal et al. 2017,
            section 5.1). Else the first steps are so large that a stack as deep as VGG's is left
            with outputs that are the same for all images.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    if small_outputs:
        *_, last = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
        nn.init.normal_(last.weight, std=0.01)


def output_shape(features: nn.Sequential, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (C, H, W) of the output for one image, without computing it."""
    image = torch.empty(1, *input_shape, device="meta")
    _, channels, height, width = copy.deepcopy(features).to("meta")(image).shape
    return channels, height, width
