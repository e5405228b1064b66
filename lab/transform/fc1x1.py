"""Fully connected layers as convolutions."""

from __future__ import annotations

import torch
from torch import nn

from lab.model.convnet import ConvNet

MODES = ("substitution", "equivalent")


class FCToConv:
    """Replaces the fully connected head of a ConvNet by convolutions.

    Two different things:

    "substitution" is another model with far fewer parameters: a hidden layer of h units becomes
    a 1x1 convolution of h // width_divisor maps, the last one a map for each class, and global
    average pooling does the rest (Lin et al. 2014, section 3.2; Szegedy et al. 2015; Kim et al.
    2017, slide 30). Weights are new.

    "equivalent" is the same model, written differently: the layer over C x H x W features as an
    H x W convolution, those over a vector as 1x1 convolutions, with the same weights. Same outputs,
    same number of parameters: it saves nothing.

    Args:
        mode: one of MODES.
        width_divisor: see above.

    Raises:
        ValueError: an argument out of range; on a call, a model without such a head.
    """

    def __init__(self, mode: str, width_divisor: int) -> None:
        if mode not in MODES:
            raise ValueError(f"transform.mode={mode}: allowed are {', '.join(MODES)}")
        if not isinstance(width_divisor, int) or width_divisor < 1:
            raise ValueError(
                f"transform.width_divisor={width_divisor}: must be an integer of at least 1"
            )
        self.mode = mode
        self.width_divisor = width_divisor

    def __call__(self, model: nn.Module) -> nn.Module:
        """`model` with another head; its features are taken over."""
        if not isinstance(model, ConvNet) or not isinstance(model.classifier, nn.Sequential):
            raise ValueError(
                "needs convolution features with fully connected layers over them: "
                "model=lenet, alexnet or alexnet_small"
            )
        convert = self._substitute if self.mode == "substitution" else self._rewrite
        return ConvNet(model.features, convert(model, model.classifier), model.feature_shape)

    def _substitute(self, model: ConvNet, head: nn.Sequential) -> nn.Sequential:
        channels = model.feature_shape[0]
        last = [layer for layer in head if isinstance(layer, nn.Linear)][-1]
        layers: list[nn.Module] = []
        for layer in head:
            if isinstance(layer, nn.Linear):
                divisor = 1 if layer is last else self.width_divisor
                maps = max(1, layer.out_features // divisor)
                layers.append(nn.Conv2d(channels, maps, kernel_size=1))
                channels = maps
            elif not isinstance(layer, nn.Flatten):
                layers.append(layer)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def _rewrite(self, model: ConvNet, head: nn.Sequential) -> nn.Sequential:
        _, *kernel = model.feature_shape
        layers: list[nn.Module] = []
        for layer in head:
            if isinstance(layer, nn.Linear):
                layers.append(_as_convolution(layer, *kernel))
                kernel = [1, 1]
            elif not isinstance(layer, nn.Flatten):
                layers.append(layer)
        return nn.Sequential(*layers, nn.Flatten())


def _as_convolution(layer: nn.Linear, height: int, width: int) -> nn.Conv2d:
    channels = layer.in_features // (height * width)
    convolution = nn.Conv2d(channels, layer.out_features, (height, width))
    with torch.no_grad():
        convolution.weight.copy_(layer.weight.view_as(convolution.weight))
        assert convolution.bias is not None
        convolution.bias.copy_(layer.bias)
    return convolution
