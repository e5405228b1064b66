"""LeNet: small convolutions, most parameters in one FC layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lab.model.convnet import ConvNet, with_fc_head
from lab.model.require import require_size

SMALLEST_PX = 16


def lenet(*, input_shape: Sequence[int], output_size: int) -> ConvNet:
    """The 20-50-500 net of Caffe's MNIST example, after LeNet-5 (LeCun et al. 1998).

    Args:
        input_shape: (C, H, W) of an image.
        output_size: width of the last layer.

    Raises:
        ValueError: images smaller than 16 px.
    """
    require_size("lenet", input_shape, SMALLEST_PX)
    features = nn.Sequential(
        nn.Conv2d(input_shape[0], 20, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
    )
    return with_fc_head(features, input_shape, [500], output_size)
