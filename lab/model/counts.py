"""Counted parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

IMAGENET = {"input_shape": (3, 224, 224), "output_size": 1000}


def parameters_of(make_model: Callable[..., nn.Module]) -> tuple[int, int]:
    """Count a model's parameters for ImageNet: all, and those in nn.Linear layers.

    Args:
        make_model: called with input_shape and output_size. Nothing is allocated.
    """
    with torch.device("meta"):
        model = make_model(**IMAGENET)
    fc = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    of_fc = sum(each.numel() for layer in fc for each in layer.parameters())
    return sum(each.numel() for each in model.parameters()), of_fc
