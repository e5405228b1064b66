"""AlexNet, whose three FC layers hold 95 % of the parameters, and a small one of the same kind."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lab.model.convnet import (
    ConvNet,
    initialise_for_relu,
    require_dropout,
    require_size,
    require_width,
    with_fc_head,
)

SMALLEST_PX = 63
SMALL_SMALLEST_PX = 8


def alexnet(*, input_shape: Sequence[int], output_size: int, dropout: float = 0.5) -> ConvNet:
    """The one-tower AlexNet (Krizhevsky 2014, "One weird trick", section 5).

    61,838,248 parameters for 3x224x224 images and 1000 classes, 94.8 % of them in the head.

    Args:
        input_shape: (C, H, W) of an image.
        output_size: width of the last layer.
        dropout: probability that an input of a hidden FC layer is dropped.

    Raises:
        ValueError: images smaller than 63 px, or `dropout` out of range.
    """
    return _for_imagenet("alexnet", (64, 192, 384, 384, 256), input_shape, output_size, dropout)


def alexnet_paper(*, input_shape: Sequence[int], output_size: int, dropout: float = 0.5) -> ConvNet:
    """The AlexNet of Kim et al. (ISPASS 2017, slide 8): the first one's widths, without its groups.

    (Krizhevsky et al. 2012, whose two towers made groups of the channels.) 62,378,344 parameters
    for 3x224x224 or 3x227x227 images and 1000 classes, 94.0 % of them in the head.

    Args:
        input_shape, output_size, dropout: as for `alexnet`.

    Raises:
        ValueError: as for `alexnet`.
    """
    widths = (96, 256, 384, 384, 256)
    return _for_imagenet("alexnet_paper", widths, input_shape, output_size, dropout)


def alexnet_small(
    *,
    input_shape: Sequence[int],
    output_size: int,
    width: int = 16,
    hidden: int = 1400,
    dropout: float = 0.0,
) -> ConvNet:
    """AlexNet's five convolutions and three FC layers for images of 8 px and more.

    With the default arguments 94.8 % of the parameters lie in the head for 1x32x32 images and 10
    classes, as in AlexNet, so that gradients are as unevenly spread over the layers.

    Args:
        input_shape: (C, H, W) of an image.
        output_size: width of the last layer.
        width: channels of the first convolution; AlexNet has 64.
        hidden: width of both hidden FC layers.
        dropout: probability that an input of a hidden FC layer is dropped.

    Raises:
        ValueError: images smaller than 8 px, or an argument out of range.
    """
    require_width("model.width", width)
    require_width("model.hidden", hidden)
    require_dropout(dropout)
    require_size("alexnet_small", input_shape, SMALL_SMALLEST_PX)
    features = nn.Sequential(
        *_convolution(input_shape[0], width),
        nn.MaxPool2d(2),
        *_convolution(width, 3 * width),
        nn.MaxPool2d(2),
        *_convolution(3 * width, 6 * width),
        *_convolution(6 * width, 6 * width),
        *_convolution(6 * width, 4 * width),
        nn.MaxPool2d(2),
    )
    model = with_fc_head(features, input_shape, [hidden, hidden], output_size, dropout)
    initialise_for_relu(model)
    return model


def _for_imagenet(
    name: str, widths: Sequence[int], input_shape: Sequence[int], output_size: int, dropout: float
) -> ConvNet:
    require_dropout(dropout)
    require_size(name, input_shape, SMALLEST_PX)
    first, second, third, fourth, fifth = widths
    features = nn.Sequential(
        *_convolution(input_shape[0], first, kernel_size=11, stride=4, padding=2),
        nn.MaxPool2d(3, stride=2),
        *_convolution(first, second, kernel_size=5, padding=2),
        nn.MaxPool2d(3, stride=2),
        *_convolution(second, third),
        *_convolution(third, fourth),
        *_convolution(fourth, fifth),
        nn.MaxPool2d(3, stride=2),
    )
    model = with_fc_head(features, input_shape, [4096, 4096], output_size, dropout)
    initialise_for_relu(model)
    return model


def _convolution(
    in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1, padding: int = 1
) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding), nn.ReLU()
