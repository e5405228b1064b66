"""GoogLeNet and its successor with BatchNorm: modules whose branches run side by side."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lab.model import require_size
from lab.model.convnet import initialise_for_relu, normalised, with_pooled_head

SMALLEST_PX = 32  # five layers halve it to one

# Szegedy et al. 2015, table 1: #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5, pool proj.
GOOGLENET = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}

# Ioffe & Szegedy 2015, figure 5: #1x1, #3x3 reduce, #3x3, double #3x3 reduce, double #3x3, pooling,
# pool proj. Without 1x1 and projection a module halves the image.
BATCH_NORM = {
    "3a": (64, 64, 64, 64, 96, "avg", 32),
    "3b": (64, 64, 96, 64, 96, "avg", 64),
    "3c": (0, 128, 160, 64, 96, "max", 0),
    "4a": (224, 64, 96, 96, 128, "avg", 128),
    "4b": (192, 96, 128, 96, 128, "avg", 128),
    "4c": (160, 128, 160, 128, 160, "avg", 128),
    "4d": (96, 128, 192, 160, 192, "avg", 128),
    "4e": (0, 128, 192, 192, 256, "max", 0),
    "5a": (352, 192, 320, 160, 224, "avg", 128),
    "5b": (352, 192, 320, 192, 224, "max", 128),
}


def googlenet(
    *, input_shape: Sequence[int], output_size: int, dropout: float = 0.4
) -> nn.Sequential:
    """GoogLeNet, Inception v1 (Szegedy et al. 2015), without its auxiliary classifiers.

    6,998,552 parameters for 3 channels and 1000 classes, at any image size. LRN is where figure 3
    has it. The paper does not say how its weights begin; these are He's (2015).

    Args:
        dropout: probability that an input of the last layer is dropped.
    """
    require_size("googlenet", input_shape, SMALLEST_PX)
    layers = OrderedDict[str, nn.Module](
        conv1=_convolution(input_shape[0], 64, 7, 2),
        pool1=_halving(),
        norm1=nn.LocalResponseNorm(5),
        conv2_reduce=_convolution(64, 64, 1),
        conv2=_convolution(64, 192, 3),
        norm2=nn.LocalResponseNorm(5),
        pool2=_halving(),
    )
    channels = 192
    for name, widths in GOOGLENET.items():
        layers[f"inception_{name}"] = module = _inception(channels, *widths)
        channels = module.out_channels
        if name in ("3b", "4e"):
            layers[f"pool{name[0]}"] = _halving()
    model = with_pooled_head(layers, channels, output_size, dropout)
    return initialise_for_relu(model, small_outputs=True)


def inception_bn(*, input_shape: Sequence[int], output_size: int) -> nn.Sequential:
    """BN-Inception (Ioffe & Szegedy 2015, figure 5), without auxiliary classifiers.

    11,285,224 parameters for 3 channels and 1000 classes, at any image size. A convolution has no
    bias, since BatchNorm would cancel it (section 3.2), and the first is dense, not separable.
    """
    require_size("inception_bn", input_shape, SMALLEST_PX)
    layers = OrderedDict[str, nn.Module](
        conv1=_normalised(input_shape[0], 64, 7, 2),
        pool1=_halving(),
        conv2_reduce=_normalised(64, 64, 1),
        conv2=_normalised(64, 192, 3),
        pool2=_halving(),
    )
    channels = 192
    for name, widths in BATCH_NORM.items():
        layers[f"inception_{name}"] = module = _inception_bn(channels, widths)
        channels = module.out_channels
    return initialise_for_relu(with_pooled_head(layers, channels, output_size))


class Inception(nn.Module):
    """Branches of the same input, concatenated: [batch, C, H, W] -> [batch, out_channels, H', W'].

    Args:
        branches: by name, with equal heights and widths of their outputs.
        out_channels: of all branches together.
    """

    def __init__(self, branches: dict[str, nn.Module], out_channels: int) -> None:
        super().__init__()
        self.branches = nn.ModuleDict(branches)
        self.out_channels = out_channels

    def forward(self, inputs: Tensor) -> Tensor:
        """See the class."""
        return torch.cat([branch(inputs) for branch in self.branches.values()], dim=1)


def _inception(
    channels: int, one: int, reduce3: int, three: int, reduce5: int, five: int, projection: int
) -> Inception:
    branches: dict[str, nn.Module] = {
        "conv1x1": _convolution(channels, one, 1),
        "conv3x3": nn.Sequential(
            _convolution(channels, reduce3, 1), _convolution(reduce3, three, 3)
        ),
        "conv5x5": nn.Sequential(
            _convolution(channels, reduce5, 1), _convolution(reduce5, five, 5)
        ),
        "pool": nn.Sequential(nn.MaxPool2d(3, 1, 1), _convolution(channels, projection, 1)),
    }
    return Inception(branches, one + three + five + projection)


def _inception_bn(channels: int, widths: tuple[int, int, int, int, int, str, int]) -> Inception:
    one, reduce3, three, reduce_double, double, pooling, projection = widths
    stride = 1 if one else 2
    branches: dict[str, nn.Module] = {
        "conv3x3": nn.Sequential(
            _normalised(channels, reduce3, 1), _normalised(reduce3, three, 3, stride)
        ),
        "double3x3": nn.Sequential(
            _normalised(channels, reduce_double, 1),
            _normalised(reduce_double, double, 3),
            _normalised(double, double, 3, stride),
        ),
    }
    pool = {"avg": nn.AvgPool2d, "max": nn.MaxPool2d}[pooling](3, stride, padding=1)
    if not one:
        branches["pool"] = pool
        return Inception(branches, three + double + channels)
    branches["conv1x1"] = _normalised(channels, one, 1)
    branches["pool"] = nn.Sequential(pool, _normalised(channels, projection, 1))
    return Inception(branches, one + three + double + projection)


def _halving() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


def _convolution(channels: int, outputs: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    padding = kernel_size // 2
    return nn.Sequential(nn.Conv2d(channels, outputs, kernel_size, stride, padding), nn.ReLU())


def _normalised(channels: int, outputs: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(*normalised(channels, outputs, kernel_size, stride), nn.ReLU())
