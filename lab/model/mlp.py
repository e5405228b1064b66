"""Fully connected layers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from lab.model.convnet import positive


def mlp(
    *, hidden: Sequence[int], image_shape: tuple[int, int, int], num_classes: int
) -> nn.Sequential:
    """Flatten, then ReLU layers of `hidden` units each, then class scores.

    Raises:
        ValueError: `hidden` is no list of positive integers.
    """
    if isinstance(hidden, str) or not isinstance(hidden, Sequence):
        raise ValueError(f"model.hidden={hidden}: must be a list of layer sizes, as in [512,256]")
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(image_shape)
    for units in hidden:
        layers += [nn.Linear(width, positive("hidden", units)), nn.ReLU(inplace=True)]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
