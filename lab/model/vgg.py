"""VGG: stacks of 3x3 convolutions under AlexNet's head (Simonyan & Zisserman 2015)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lab.model.convnet import ConvNet, initialise_for_relu, with_fc_head
from lab.model.require import require_dropout, require_size
from lab.settings import checks

SMALLEST_PX = 32  # five poolings halve it to one
WIDTHS = (64, 128, 256, 512, 512)


def vgg11(
    *, input_shape: Sequence[int], output_size: int, hidden: int = 4096, dropout: float = 0.5
) -> ConvNet:
    """VGG-11, configuration A of table 1.

    132,863,336 parameters for 3x224x224 images and 1000 classes, 93.1 % of them in the head.

    Args:
        input_shape: (C, H, W) of an image.
        output_size: width of the last layer.
        hidden: width of both hidden FC layers.
        dropout: probability that an output of a hidden FC layer is dropped.

    Raises:
        ValueError: images smaller than 32 px, or an argument out of range.
    """
    return _vgg("vgg11", (1, 1, 2, 2, 2), input_shape, output_size, hidden, dropout)


def vgg16(
    *, input_shape: Sequence[int], output_size: int, hidden: int = 4096, dropout: float = 0.5
) -> ConvNet:
    """VGG-16, configuration D of table 1.

    138,357,544 parameters for 3x224x224 images and 1000 classes, 89.4 % of them in the head.

    Args, Raises: as for `vgg11`.
    """
    return _vgg("vgg16", (2, 2, 3, 3, 3), input_shape, output_size, hidden, dropout)


def vgg19(
    *, input_shape: Sequence[int], output_size: int, hidden: int = 4096, dropout: float = 0.5
) -> ConvNet:
    """VGG-19, configuration E of table 1.

    143,667,240 parameters for 3x224x224 images and 1000 classes, 86.1 % of them in the head.

    Args, Raises: as for `vgg11`.
    """
    return _vgg("vgg19", (2, 2, 4, 4, 4), input_shape, output_size, hidden, dropout)


def _vgg(
    name: str,
    depths: Sequence[int],
    input_shape: Sequence[int],
    output_size: int,
    hidden: int,
    dropout: float,
) -> ConvNet:
    """Stack `depths` convolutions of each width, with a pooling after each stack.

    Weights are He's (2015), not the paper's: it had to train VGG-11 first, and begin the deeper
    ones with its layers (section 3.1).
    """
    checks.whole("model.hidden", hidden, 1)
    require_dropout(dropout)
    require_size(name, input_shape, SMALLEST_PX)
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for width, depth in zip(WIDTHS, depths, strict=True):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    features = nn.Sequential(*layers)
    model = with_fc_head(features, input_shape, [hidden] * 2, output_size, dropout, True)
    initialise_for_relu(model, small_outputs=True)
    return model
