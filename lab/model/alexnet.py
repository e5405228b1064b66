"""AlexNet, whose three FC layers hold 95 % of the parameters, and others of the same kind."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lab.model import require_size, require_widths
from lab.model.convnet import ConvNet, initialise_for_relu, stacked, with_fc_head
from lab.settings import checks

SMALLEST_PX = 63
MXNET_SMALLEST_PX = 67
OVERFEAT_SMALLEST_PX = 71
SMALL_SMALLEST_PX = 8
CIFAR_SMALLEST_PX = 15
ONE_TOWER = (64, 192, 384, 384, 256)
FC = (4096, 4096)  # widths of the hidden FC layers
FIRST = (96, 256, 384, 384, 256)  # of Krizhevsky et al. 2012, both towers together


def alexnet(
    *,
    input_shape: Sequence[int],
    output_size: int,
    widths: Sequence[int] = ONE_TOWER,
    dropout: float = 0.5,
) -> ConvNet:
    """The one-tower AlexNet (Krizhevsky 2014, "One weird trick", section 5).

    61,838,248 parameters for 3x224x224 images and 1000 classes, 94.8 % of them in the head.

    Args:
        widths: channels of the five convolutions; torchvision has 64, 192, 384, 256, 256.
        dropout: probability that an input of a hidden FC layer is dropped.
    """
    require_widths("model.widths", widths)
    if len(widths) != 5:
        raise ValueError(f"model.widths={widths}: must be five integers, one for each convolution")
    return _for_imagenet("alexnet", widths, input_shape, output_size, dropout)


def alexnet_paper(*, input_shape: Sequence[int], output_size: int, dropout: float = 0.5) -> ConvNet:
    """The AlexNet of Kim et al. (ISPASS 2017, slide 8): the first one's widths, without its groups.

    (Krizhevsky et al. 2012, whose two towers made groups of the channels.) 62,378,344 parameters
    for 3x224x224 or 3x227x227 images and 1000 classes, 94.0 % of them in the head.
    """
    return _for_imagenet("alexnet_paper", FIRST, input_shape, output_size, dropout)


def alexnet_mxnet(*, input_shape: Sequence[int], output_size: int, dropout: float = 0.5) -> ConvNet:
    """The AlexNet of MXNet's examples: no padding before conv1, and LRN after two poolings.

    (apache/mxnet, example/image-classification/symbols/alexnet.py.) 62,378,344 parameters for
    3x227x227 images and 1000 classes; 50,844,008 for 224 px, whose feature map is 5x5.

    Args:
        dropout: probability that an output of a hidden FC layer is dropped.
    """
    require_size("alexnet_mxnet", input_shape, MXNET_SMALLEST_PX)
    first, second, *others = FIRST
    features = stacked(
        input_shape[0],
        *((first, 11, 4, 0), nn.MaxPool2d(3, 2), nn.LocalResponseNorm(5)),
        *((second, 5, 1, 2), nn.MaxPool2d(3, 2), nn.LocalResponseNorm(5)),
        *(*others, nn.MaxPool2d(3, 2)),
    )
    model = with_fc_head(features, input_shape, FC, output_size, dropout, dropout_after=True)
    return initialise_for_relu(model, small_outputs=True)


def overfeat(*, input_shape: Sequence[int], output_size: int, dropout: float = 0.5) -> ConvNet:
    """The fast model of OverFeat (Sermanet et al. 2014, table 1).

    145,920,872 parameters for 3x231x231 images and 1000 classes, 89.0 % of them in the head.
    """
    require_size("overfeat", input_shape, OVERFEAT_SMALLEST_PX)
    features = stacked(
        input_shape[0],
        *((96, 11, 4, 0), nn.MaxPool2d(2), (256, 5, 1, 0), nn.MaxPool2d(2)),
        *(512, 1024, 1024, nn.MaxPool2d(2)),
    )
    model = with_fc_head(features, input_shape, [3072, 4096], output_size, dropout)
    return initialise_for_relu(model, small_outputs=True)


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
        width: channels of the first convolution; AlexNet has 64.
        hidden: width of both hidden FC layers.
        dropout: probability that an input of a hidden FC layer is dropped.
    """
    checks.integer("model.width", width, 1)
    require_size("alexnet_small", input_shape, SMALL_SMALLEST_PX)
    features = stacked(
        input_shape[0],
        *(width, nn.MaxPool2d(2), 3 * width, nn.MaxPool2d(2)),
        *(6 * width, 6 * width, 4 * width, nn.MaxPool2d(2)),
    )
    model = with_fc_head(features, input_shape, [hidden, hidden], output_size, dropout)
    return initialise_for_relu(model)


def alexnet_cifar(*, input_shape: Sequence[int], output_size: int) -> ConvNet:
    """The AlexNet-R of Shi et al. (2016), for CIFAR-10: three convolutions and one FC layer.

    (hclhkbu/dlbench, tools/torch/Models/alexnet.lua.) 85,098 parameters for 3x32x32 images and 10
    classes.
    """
    require_size("alexnet_cifar", input_shape, CIFAR_SMALLEST_PX)
    features = nn.Sequential(
        *(nn.Conv2d(input_shape[0], 32, 5, padding=2), nn.MaxPool2d(3, 2), nn.ReLU()),
        *stacked(32, (32, 5, 1, 2), nn.MaxPool2d(3, 2), (64, 5, 1, 2), nn.AvgPool2d(3, 2)),
    )
    return initialise_for_relu(with_fc_head(features, input_shape, [], output_size))


def _for_imagenet(
    name: str, widths: Sequence[int], input_shape: Sequence[int], output_size: int, dropout: float
) -> ConvNet:
    require_size(name, input_shape, SMALLEST_PX)
    first, second, *others = widths
    features = stacked(
        input_shape[0],
        *((first, 11, 4, 2), nn.MaxPool2d(3, 2), (second, 5, 1, 2), nn.MaxPool2d(3, 2)),
        *(*others, nn.MaxPool2d(3, 2)),
    )
    return initialise_for_relu(with_fc_head(features, input_shape, FC, output_size, dropout))
