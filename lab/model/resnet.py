"""Residual networks (He et al. 2016), for ImageNet and for CIFAR."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import pad

from lab.model import require_size
from lab.model.convnet import initialise_for_relu, normalised, with_pooled_head
from lab.settings import checks

SMALLEST_PX = 32
CIFAR_SMALLEST_PX = 4
STRIDES_IN = ("1x1", "3x3")
WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # a bottleneck's output has four times the channels of its 3x3 convolution
CIFAR_WIDTHS = (16, 32, 64)
CIFAR_BLOCKS = 9  # in each of three stages: 6 * 9 + 2 = 56 layers


def resnet50(
    *, input_shape: Sequence[int], output_size: int, stride_in: str = "1x1"
) -> nn.Sequential:
    """ResNet-50 (table 1): 25,557,032 parameters for 1000 classes, at any image size.

    Args:
        stride_in: the convolution of a stage's first bottleneck that halves the image: "1x1" as in
            the paper, or "3x3", which is called v1.5.
    """
    return _for_imagenet("resnet50", (3, 4, 6, 3), input_shape, output_size, stride_in)


def resnet152(
    *, input_shape: Sequence[int], output_size: int, stride_in: str = "1x1"
) -> nn.Sequential:
    """ResNet-152 (table 1): 60,192,808 parameters for 1000 classes, at any image size."""
    return _for_imagenet("resnet152", (3, 8, 36, 3), input_shape, output_size, stride_in)


def resnet56(*, input_shape: Sequence[int], output_size: int) -> nn.Sequential:
    """The ResNet-56 for CIFAR-10 (section 4.2), whose shortcuts have no parameters (option A).

    853,018 parameters for 3 channels and 10 classes, at any image size.
    """
    require_size("resnet56", input_shape, CIFAR_SMALLEST_PX)
    stem = normalised(input_shape[0], CIFAR_WIDTHS[0], 3)
    layers = OrderedDict[str, nn.Module](stem=nn.Sequential(*stem, nn.ReLU()))
    channels = CIFAR_WIDTHS[0]
    for stage, width in enumerate(CIFAR_WIDTHS, start=1):
        blocks: list[nn.Module] = []
        for block in range(CIFAR_BLOCKS):
            blocks.append(_basic(channels, width, 2 if stage > 1 and block == 0 else 1))
            channels = width
        layers[f"stage{stage}"] = nn.Sequential(*blocks)
    return initialise_for_relu(with_pooled_head(layers, channels, output_size))


class Residual(nn.Module):
    """ReLU(body(x) + shortcut(x)): [batch, C, H, W] -> [batch, C', H', W'].

    Args:
        body: the convolutions.
        shortcut: maps x to the shape of the body's output.
    """

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut
        self.relu = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        """See the class."""
        return self.relu(self.body(inputs) + self.shortcut(inputs))


class Subsample(nn.Module):
    """A shortcut without parameters: every `stride`-th pixel, and zeros for `more` channels."""

    def __init__(self, stride: int, more: int) -> None:
        super().__init__()
        self.stride, self.more = stride, more

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [batch, C, H, W] to [batch, C + more, ceil(H / stride), ceil(W / stride)]."""
        kept = inputs[:, :, :: self.stride, :: self.stride]
        return pad(kept, (0, 0, 0, 0, 0, self.more))


def _for_imagenet(
    name: str, depths: Sequence[int], input_shape: Sequence[int], output_size: int, stride_in: str
) -> nn.Sequential:
    checks.one_of("model.stride_in", stride_in, STRIDES_IN)
    require_size(name, input_shape, SMALLEST_PX)
    stem = [*normalised(input_shape[0], 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    layers = OrderedDict[str, nn.Module](stem=nn.Sequential(*stem))
    channels = 64
    for stage, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True), start=1):
        blocks: list[nn.Module] = []
        for block in range(depth):
            stride = 2 if stage > 1 and block == 0 else 1
            blocks.append(_bottleneck(channels, width, stride, stride_in))
            channels = EXPANSION * width
        layers[f"stage{stage}"] = nn.Sequential(*blocks)
    return initialise_for_relu(with_pooled_head(layers, channels, output_size))


def _bottleneck(channels: int, width: int, stride: int, stride_in: str) -> Residual:
    first, second = (stride, 1) if stride_in == "1x1" else (1, stride)
    outputs = EXPANSION * width
    body = nn.Sequential(
        *normalised(channels, width, 1, first),
        nn.ReLU(),
        *normalised(width, width, 3, second),
        nn.ReLU(),
        *normalised(width, outputs, 1),
    )
    if channels == outputs:
        return Residual(body, nn.Identity())
    return Residual(body, nn.Sequential(*normalised(channels, outputs, 1, stride)))


def _basic(channels: int, width: int, stride: int) -> Residual:
    body = nn.Sequential(
        *normalised(channels, width, 3, stride), nn.ReLU(), *normalised(width, width, 3)
    )
    return Residual(body, Subsample(stride, width - channels) if stride > 1 else nn.Identity())
