"""Convolution features under a fully connected (FC) head: LeNet, VGG, the CNN of Keras."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from lab.model import require_dropout, require_size, require_widths
from lab.settings import checks

LENET_SMALLEST_PX = 16
VGG_SMALLEST_PX = 32  # five poolings halve it to one
VGG_WIDTHS = (64, 128, 256, 512, 512)

Stacked = int | tuple[int, int, int, int] | nn.Module
Net = TypeVar("Net", bound=nn.Module)


class ConvNet(nn.Sequential):
    """A head over convolution features, separate so that a transform can replace the head.

    Maps images [batch, C, H, W] to outputs [batch, output_size].

    Args:
        features: [batch, *input_shape] -> [batch, *feature_shape].
        classifier: [batch, *feature_shape] -> [batch, output_size].
        feature_shape: (C, H, W) of the features' output.
    """

    def __init__(
        self,
        features: nn.Sequential,
        classifier: nn.Sequential,
        feature_shape: tuple[int, int, int],
    ) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        self.feature_shape = feature_shape


def stacked(channels: int, *layers: Stacked) -> nn.Sequential:
    """Return layers for inputs of so many channels, each convolution with a ReLU after it.

    Args:
        layers: the width of a 3x3 convolution with a padding of 1; or width, size, stride and
            padding of another; or a module, which keeps the number of channels.
    """
    modules = list[nn.Module]()
    for layer in layers:
        if isinstance(layer, nn.Module):
            modules.append(layer)
            continue
        width, size, stride, padding = (layer, 3, 1, 1) if isinstance(layer, int) else layer
        modules += [nn.Conv2d(channels, width, size, stride, padding), nn.ReLU()]
        channels = width
    return nn.Sequential(*modules)


def with_fc_head(
    features: nn.Sequential,
    input_shape: Sequence[int],
    hidden: Sequence[int],
    output_size: int,
    dropout: float = 0.0,
    dropout_after: bool = False,
) -> ConvNet:
    """Put `features` under FC layers of widths `hidden`, each with dropout and a ReLU.

    Args:
        features: convolutions and pooling.
        hidden: widths of the hidden layers.
        dropout: probability that an input of a hidden layer is dropped; 0 adds no such layer.
        dropout_after: drop outputs of a hidden layer instead of inputs.

    Raises:
        ValueError: a width or the dropout is out of range.
    """
    require_dropout(dropout)
    shape = output_shape(features, input_shape)
    head: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for hidden_width in hidden:
        checks.integer("model.hidden", hidden_width, 1)
        layers = [nn.Linear(width, hidden_width), nn.ReLU()]
        dropped = [nn.Dropout(dropout)] if dropout else []
        head += [*layers, *dropped] if dropout_after else [*dropped, *layers]
        width = hidden_width
    head.append(nn.Linear(width, output_size))
    return ConvNet(features, nn.Sequential(*head), shape)


def initialise(module: nn.Module, draw: Callable[[Tensor], Tensor]) -> None:
    """Let `draw` fill the weights of convolutions and FC layers; biases become zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            draw(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def initialise_for_relu(module: Net, *, small_outputs: bool = False) -> Net:
    """Draw weights so that ReLU layers keep the variance of their inputs; return the module.

    He et al. 2015, section 2.2 (fan-in); biases are zero. PyTorch's default shrinks the signal
    layer by layer, and a stack as deep as AlexNet's then hardly begins to learn without BatchNorm.

    Args:
        module: its convolutions and FC layers get new weights.
        small_outputs: draw those of the last FC layer from N(0, 0.01) instead (Goyal et al. 2017,
            section 5.1). Else the first steps are so large that a stack as deep as VGG's is left
            with outputs that are the same for all images.
    """
    initialise(module, lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"))
    if small_outputs:
        *_, last = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
        nn.init.normal_(last.weight, std=0.01)
    return module


def normalised(
    channels: int, outputs: int, kernel_size: int, stride: int = 1
) -> tuple[nn.Module, nn.Module]:
    """Return a convolution without a bias, padded for stride 1, and the BatchNorm after it."""
    padding = kernel_size // 2
    convolution = nn.Conv2d(channels, outputs, kernel_size, stride, padding, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def with_pooled_head(
    layers: OrderedDict[str, nn.Module], channels: int, output_size: int, dropout: float = 0.0
) -> nn.Sequential:
    """Put `layers`, which end with so many channels, under their mean pixel and one FC layer."""
    require_dropout(dropout)
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    if dropout:
        layers["dropout"] = nn.Dropout(dropout)
    layers["fc"] = nn.Linear(channels, output_size)
    return nn.Sequential(layers)


def output_shape(features: nn.Sequential, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (C, H, W) of the output for one image, without computing it."""
    image = torch.empty(1, *input_shape, device="meta")
    _, channels, height, width = copy.deepcopy(features).to("meta")(image).shape
    return channels, height, width


def lenet(*, input_shape: Sequence[int], output_size: int) -> ConvNet:
    """The 20-50-500 net of Caffe's MNIST example, after LeNet-5 (LeCun et al. 1998)."""
    require_size("lenet", input_shape, LENET_SMALLEST_PX)
    features = nn.Sequential(
        nn.Conv2d(input_shape[0], 20, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
    )
    return with_fc_head(features, input_shape, [500], output_size)


def vgg11(
    *, input_shape: Sequence[int], output_size: int, hidden: int = 4096, dropout: float = 0.5
) -> ConvNet:
    """VGG-11 (Simonyan & Zisserman 2015), configuration A of table 1: 3x3 convolutions.

    132,863,336 parameters for 3x224x224 images and 1000 classes, 93.1 % of them in the head.

    Args:
        hidden: width of both hidden FC layers.
        dropout: probability that an output of a hidden FC layer is dropped.
    """
    return _vgg("vgg11", (1, 1, 2, 2, 2), input_shape, output_size, hidden, dropout)


def vgg16(
    *, input_shape: Sequence[int], output_size: int, hidden: int = 4096, dropout: float = 0.5
) -> ConvNet:
    """VGG-16, configuration D of table 1.

    138,357,544 parameters for 3x224x224 images and 1000 classes, 89.4 % of them in the head.
    """
    return _vgg("vgg16", (2, 2, 3, 3, 3), input_shape, output_size, hidden, dropout)


def vgg19(
    *, input_shape: Sequence[int], output_size: int, hidden: int = 4096, dropout: float = 0.5
) -> ConvNet:
    """VGG-19, configuration E of table 1.

    143,667,240 parameters for 3x224x224 images and 1000 classes, 86.1 % of them in the head.
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
    require_size(name, input_shape, VGG_SMALLEST_PX)
    layers = list[Stacked]()
    for width, depth in zip(VGG_WIDTHS, depths, strict=True):
        layers += [*[width] * depth, nn.MaxPool2d(2)]
    features = stacked(input_shape[0], *layers)
    model = with_fc_head(features, input_shape, [hidden] * 2, output_size, dropout, True)
    return initialise_for_relu(model, small_outputs=True)


def keras_cnn(
    *,
    input_shape: Sequence[int],
    output_size: int,
    blocks: Sequence[Sequence[int]] = ((32, 32), (64, 64)),
    hidden: int = 256,
    block_dropout: float = 0.25,
    dropout: float = 0.5,
) -> ConvNet:
    """The "VGG-like convnet" of Keras 1's guide to its Sequential model.

    7,998,250 parameters for 3x100x100 images and 10 classes, 99.2 % of them in the head. With
    blocks=[[32,64]] hidden=128 it is Keras' mnist_cnn. Weights are Glorot's (2010), as in Keras.

    Args:
        blocks: for each block, the channels of its 3x3 convolutions, which have no padding. Max
            pooling, which halves the image, ends a block.
        hidden: width of the hidden FC layer.
        block_dropout: probability that an output of a block is dropped.
        dropout: probability that an output of the hidden FC layer is dropped.
    """
    if not isinstance(blocks, Sequence) or isinstance(blocks, str) or not blocks:
        raise ValueError(f"model.blocks={blocks}: must be a list of blocks such as [[32,32],[64]]")
    for block in blocks:
        require_widths("model.blocks", block)
    require_dropout(block_dropout, "model.block_dropout")
    smallest = 1  # one pixel is left after the last block
    for block in reversed(blocks):
        smallest = 2 * smallest + 2 * len(block)  # a 3x3 convolution without padding takes two
    require_size("keras_cnn", input_shape, smallest)
    layers = list[Stacked]()
    for block in blocks:
        layers += [*((width, 3, 1, 0) for width in block), nn.MaxPool2d(2)]
        layers.append(nn.Dropout(block_dropout))
    features = stacked(input_shape[0], *layers)
    model = with_fc_head(features, input_shape, [hidden], output_size, dropout, dropout_after=True)
    initialise(model, nn.init.xavier_uniform_)
    return model
