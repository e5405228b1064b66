"""Count the parameters and operations of a model in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lab.model.facts import Counts

IMAGENET = {"input_shape": (3, 224, 224), "output_size": 1000}
KINDS: dict[type[nn.Module], str] = {nn.Conv2d: "conv", nn.Linear: "fc"}


def counts_of(make_model: Callable[..., nn.Module]) -> Counts:
    """Count a model for ImageNet; fully connected layers are nn.Linear.

    Args:
        make_model: called with input_shape and output_size. Nothing is allocated or computed.
    """
    with torch.device("meta"):
        model, images = make_model(**IMAGENET), torch.empty(1, *IMAGENET["input_shape"])
    with FlopCounterMode(display=False) as counter:
        model(images)
    by_module = counter.get_flop_counts()
    layers = [(path, layer) for path, layer in model.named_modules() if type(layer) in KINDS]
    operations = {
        f"{KINDS[type(layer)]}{number}": sum(by_module[f"{type(model).__name__}.{path}"].values())
        for number, (path, layer) in enumerate(layers, start=1)
    }
    connected = sum(_size(layer) for _, layer in layers if isinstance(layer, nn.Linear))
    return Counts(_size(model), connected, operations)


def _size(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.parameters())
