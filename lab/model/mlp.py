"""A multi-layer perceptron: FC layers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn


def mlp(
    *, image_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (512, 256)
) -> nn.Sequential:
    """FC layers with ReLU between them: images [batch, C, H, W] -> logits [batch, num_classes].

    Args:
        image_shape: (C, H, W) of one image.
        num_classes: width of the last layer.
        hidden: widths of the hidden layers; none makes a linear classifier.

    Raises:
        ValueError: `hidden` is not a list of integers of at least 1.
    """
    listed = isinstance(hidden, Sequence) and not isinstance(hidden, str)
    if not listed or not all(isinstance(width, int) and width >= 1 for width in hidden):
        raise ValueError(f"model.hidden={hidden}: must be a list of integers of at least 1")
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(image_shape)
    for hidden_width in hidden:
        layers += [nn.Linear(width, hidden_width), nn.ReLU()]
        width = hidden_width
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
