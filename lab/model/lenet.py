"""The 20-50-500 network that framework tutorials of the time shared."""

from __future__ import annotations

from torch import nn

from lab.model.convnet import ConvNet, classifier, feature_shape

LEAST_SIZE = 16


def lenet(*, image_shape: tuple[int, int, int], num_classes: int) -> ConvNet:
    """Two 5x5 convolutions (20 and 50 maps) with max-pooling, 500 hidden units (LeCun et al. 1998).

    Raises:
        ValueError: images below 16 px.
    """
    features = nn.Sequential(
        nn.Conv2d(image_shape[0], 20, kernel_size=5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.MaxPool2d(2),
    )
    shape = feature_shape(features, image_shape, "lenet", LEAST_SIZE)
    return ConvNet(features, classifier(shape, [500], num_classes, dropout=0.0), shape)
