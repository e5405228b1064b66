"""Count the parameters of a model in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lab.model.facts import Parameters

IMAGENET = {"input_shape": (3, 224, 224), "output_size": 1000}


def parameters_of(make_model: Callable[..., nn.Module]) -> Parameters:
    """Count the parameters of a model for ImageNet; fully connected layers are nn.Linear.

    Args:
        make_model: called with input_shape and output_size. Nothing is allocated.
    """
    with torch.device("meta"):
        model = make_model(**IMAGENET)
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    fully_connected = sum(tensor.numel() for layer in linear for tensor in layer.parameters())
    return Parameters(sum(tensor.numel() for tensor in model.parameters()), fully_connected)
