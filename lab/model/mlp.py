"""A multi-layer perceptron: FC layers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn


def mlp(
    *, input_shape: Sequence[int], output_size: int, hidden: Sequence[int] = (512, 256)
) -> nn.Sequential:
    """Return FC layers with ReLU between them: [batch, *input_shape] -> [batch, output_size].

    Args:
        input_shape: of one input; flattened.
        output_size: width of the last layer.
        hidden: widths of the hidden layers; none makes a linear model.

    Raises:
        ValueError: `hidden` is not a list of integers of at least 1.
    """
    listed = isinstance(hidden, Sequence) and not isinstance(hidden, str)
    if not listed or not all(isinstance(width, int) and width >= 1 for width in hidden):
        raise ValueError(f"model.hidden={hidden}: must be a list of integers of at least 1")
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for hidden_width in hidden:
        layers += [nn.Linear(width, hidden_width), nn.ReLU()]
        width = hidden_width
    return nn.Sequential(*layers, nn.Linear(width, output_size))
