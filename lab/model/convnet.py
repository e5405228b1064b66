"""Convolution features followed by a classifier: the shape that lenet and alexnet share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """`classifier(features(images))`.

    Attributes:
        feature_shape: (channels, height, width) of what `features` gives to `classifier`.
    """

    def __init__(
        self, features: nn.Sequential, classifier: nn.Module, feature_shape: tuple[int, int, int]
    ) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        self.feature_shape = feature_shape

    def forward(self, images: Tensor) -> Tensor:
        """Class scores [batch, classes] of images [batch, channels, height, width]."""
        return self.classifier(self.features(images))


def feature_shape(
    features: nn.Module, image_shape: tuple[int, int, int], name: str, least: int
) -> tuple[int, int, int]:
    """Shape of `features` of one image.

    Args:
        name: of the model, for the error.
        least: smallest side that the model can take, in pixels.

    Raises:
        ValueError: the images are smaller.
    """
    channels, height, width = image_shape
    if min(height, width) < least:
        raise ValueError(
            f"model={name}: needs images of at least {least} px, the data gives "
            f"{height}x{width}; set data.size={least} or more"
        )
    with torch.no_grad():
        shape = features(torch.zeros(1, channels, height, width)).shape
    return shape[1], shape[2], shape[3]


def classifier(
    feature_shape: tuple[int, int, int], hidden: list[int], num_classes: int, dropout: float
) -> nn.Sequential:
    """Fully connected layers over flattened features, ReLU and dropout between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = feature_shape[0] * feature_shape[1] * feature_shape[2]
    for next_width in hidden:
        layers += [nn.Linear(width, next_width), nn.ReLU(inplace=True)]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = next_width
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def positive(name: str, value: object) -> int:
    """`value` if it is an integer above 0.

    Raises:
        ValueError: names the setting otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"model.{name}={value}: must be an integer of at least 1")
    return value


def fraction(name: str, value: object) -> float:
    """`value` if it is a number from 0 up to but not including 1.

    Raises:
        ValueError: names the setting otherwise.
    """
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"model.{name}={value}: must be a number from 0 to below 1")
    return float(value)
