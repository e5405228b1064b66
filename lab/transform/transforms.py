"""Transforms: they rebuild a model before it is placed on a device."""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lab.convolution.layer import Chooser, ChosenConv2d, fixed, heuristic, profile
from lab.model.convnet import ConvNet, initialise_for_relu
from lab.settings import checks

CHOICES = ("fixed", "heuristic", "profile")  # of a convolution's algorithms
MODES = ("substitution", "equivalent")  # of Fc1x1


class Checkpoint:
    """A transform that keeps only the inputs of some modules, and runs their forward twice.

    (T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.) Parameters and their
    names stay, and so do results, to the bit: dropout draws the same numbers again.

    Args: modules: a regular expression for the paths of the modules, as named_modules() has them.

    Raises: ValueError: it is no regular expression, or none is given.
    """

    def __init__(self, modules: str | None = None) -> None:
        if modules is None:
            raise ValueError(
                "transform.modules=null: must be a regular expression for module paths, such "
                r"as transform.modules='blocks\.\d+'"
            )
        try:
            self._modules = re.compile(str(modules))
        except re.error as error:
            raise ValueError(
                f"transform.modules={modules}: not a regular expression: {error}"
            ) from None

    def __call__(self, model: nn.Module) -> nn.Module:
        """Change the modules of `model` in place, and return it.

        Raises: ValueError: no module's path matches.
        """
        found = {p: m for p, m in model.named_modules() if p and self._modules.fullmatch(p)}
        if not found:
            paths = [path for path, _ in model.named_modules() if path]
            raise ValueError(
                f"transform.modules={self._modules.pattern} matches none of the model's "
                f"{len(paths)} modules: {', '.join(paths[:6])}, ..."
            )
        for module in found.values():
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        return model


class Convolution:
    """A transform that gives each convolution the algorithms that `choose` finds.

    Parameters and their names stay, so checkpoints do. Results are equal up to rounding.

    Args:
        choose: "fixed" takes `algorithm`, and the library where that one refuses; "heuristic" the
            fewest counted operations and bytes; "profile" the fastest in trials at the first
            forward of each shape, so that two runs may differ by rounding.
        algorithm: a name of lab.convolution.algorithms.ALGORITHMS, or "winograd".

    Raises: ValueError: an argument that is not allowed.
    """

    def __init__(self, choose: str = "profile", algorithm: str = "gemm") -> None:
        checks.one_of("transform.choose", choose, CHOICES)
        try:
            own = fixed(algorithm)
        except ValueError as error:
            raise ValueError(f"transform.{error}") from None
        ways: dict[str, Chooser] = {"fixed": own, "heuristic": heuristic, "profile": profile}
        self._choose = ways[choose]

    def __call__(self, model: nn.Module) -> nn.Module:
        """Replace the convolutions of `model` in place, and return it.

        Raises: ValueError: it has none that the algorithms know.
        """
        found = [
            (parent, name, layer)
            for parent in model.modules()
            for name, layer in parent.named_children()
            if ChosenConv2d.can_replace(layer)
        ]
        if not found:
            raise ValueError(
                f"transform=convolution: {type(model).__name__} has no 2-d convolution without "
                "dilation"
            )
        for parent, name, layer in found:
            assert isinstance(layer, nn.Conv2d)
            setattr(parent, name, ChosenConv2d(layer, self._choose))
        return model


class Fc1x1:
    """A transform that replaces the FC head of a ConvNet by convolutions.

    "substitution" makes another model: each FC layer becomes a 1x1 convolution at every position of
    the feature map, hidden ones with fewer channels, and global average pooling follows the last
    (Network In Network, Lin et al. 2014, section 3; GoogLeNet, Szegedy et al. 2015). The head of
    AlexNet becomes 25 times smaller. Its weights are new, drawn from torch's global generator.

    "equivalent" computes the same function with as many parameters: the first FC layer becomes one
    convolution as large as the feature map, the others 1x1 convolutions; the weights are copied.

    Args:
        mode: "substitution" or "equivalent".
        width_divisor: a hidden layer of h units becomes h // width_divisor channels (substitution).

    Raises: ValueError: an argument out of range.
    """

    def __init__(self, mode: str = "substitution", width_divisor: int = 4) -> None:
        self.mode = checks.one_of("transform.mode", mode, MODES)
        self.width_divisor = checks.integer("transform.width_divisor", width_divisor, 1)

    def __call__(self, model: nn.Module) -> ConvNet:
        """Return a ConvNet with the features of `model` (shared, not copied) under another head.

        Raises: ValueError: `model` has no FC head over convolution features.
        """
        if not isinstance(model, ConvNet) or not isinstance(model.classifier[0], nn.Flatten):
            raise ValueError(
                f"transform=fc1x1: {type(model).__name__} has no FC head on convolution "
                "features; use model=lenet, alexnet, vgg16, overfeat or keras_cnn"
            )
        head = self._substitute(model) if self.mode == "substitution" else _rewrite(model)
        return ConvNet(model.features, head, model.feature_shape)

    def _substitute(self, model: ConvNet) -> nn.Sequential:
        *hidden, last = list(model.classifier)[1:]
        channels = model.feature_shape[0]
        layers: list[nn.Module] = []
        for layer in hidden:
            if isinstance(layer, nn.Linear):
                width = max(1, layer.out_features // self.width_divisor)
                layer = nn.Conv2d(channels, width, 1)
                channels = width
            layers.append(layer)
        assert isinstance(last, nn.Linear)
        layers.append(nn.Conv2d(channels, last.out_features, 1))
        head = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        initialise_for_relu(head)
        return head


def _rewrite(model: ConvNet) -> nn.Sequential:
    shape = model.feature_shape
    layers: list[nn.Module] = []
    for layer in list(model.classifier)[1:]:
        if isinstance(layer, nn.Linear):
            layer = _as_convolution(layer, shape)
            shape = (layer.out_channels, 1, 1)
        layers.append(layer)
    return nn.Sequential(*layers, nn.Flatten())


def _as_convolution(linear: nn.Linear, shape: tuple[int, int, int]) -> nn.Conv2d:
    """Return a convolution of inputs (C, H, W) that equals `linear` on flattened inputs."""
    channels, height, width = shape
    convolution = nn.Conv2d(channels, linear.out_features, (height, width))
    with torch.no_grad():
        convolution.weight.copy_(linear.weight.view_as(convolution.weight))
        assert convolution.bias is not None
        convolution.bias.copy_(linear.bias)
    return convolution
