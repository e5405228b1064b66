"""AlexNet in one tower, and a small sibling with the same share of fully connected parameters."""

from __future__ import annotations

from torch import nn

from lab.model.convnet import ConvNet, classifier, feature_shape, fraction, positive

LEAST_SIZE = 63
LEAST_SIZE_SMALL = 8


def alexnet(*, dropout: float, image_shape: tuple[int, int, int], num_classes: int) -> ConvNet:
    """64-192-384-384-256 convolution maps, two hidden layers of 4096 units.

    The one-tower variant that benchmarks use: with 3x224x224 images and 1000 classes it has
    61.8 M parameters, 94.8 % of them in the three fully connected layers.

    Raises:
        ValueError: images below 63 px, or a dropout that is no probability.
    """
    features = nn.Sequential(
        *(nn.Conv2d(image_shape[0], 64, kernel_size=11, stride=4, padding=2), nn.ReLU(True)),
        nn.MaxPool2d(3, stride=2),
        *(nn.Conv2d(64, 192, kernel_size=5, padding=2), nn.ReLU(True)),
        nn.MaxPool2d(3, stride=2),
        *(nn.Conv2d(192, 384, kernel_size=3, padding=1), nn.ReLU(True)),
        *(nn.Conv2d(384, 384, kernel_size=3, padding=1), nn.ReLU(True)),
        *(nn.Conv2d(384, 256, kernel_size=3, padding=1), nn.ReLU(True)),
        nn.MaxPool2d(3, stride=2),
    )
    shape = feature_shape(features, image_shape, "alexnet", LEAST_SIZE)
    head = classifier(shape, [4096, 4096], num_classes, fraction("dropout", dropout))
    return ConvNet(features, head, shape)


def alexnet_small(
    *, width: int, hidden: int, dropout: float, image_shape: tuple[int, int, int], num_classes: int
) -> ConvNet:
    """AlexNet's layers for images of 8 to 32 px: 3x3 convolutions of width * (1, 3, 6, 6, 4) maps.

    With the defaults, 32 px and 10 classes, 94.8 % of its 3.6 M parameters are in the fully
    connected layers, as in `alexnet`.

    Raises:
        ValueError: images below 8 px, or an argument out of range.
    """
    maps = [positive("width", width) * times for times in (1, 3, 6, 6, 4)]
    pooled = {0, 1, 4}
    layers: list[nn.Module] = []
    for index, (before, after) in enumerate(zip([image_shape[0], *maps], maps, strict=False)):
        layers += [nn.Conv2d(before, after, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
        if index in pooled:
            layers.append(nn.MaxPool2d(2))
    features = nn.Sequential(*layers)
    shape = feature_shape(features, image_shape, "alexnet_small", LEAST_SIZE_SMALL)
    units = positive("hidden", hidden)
    head = classifier(shape, [units, units], num_classes, fraction("dropout", dropout))
    return ConvNet(features, head, shape)
