"""Counted parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

IMAGENET = {"image_shape": (3, 224, 224), "num_classes": 1000}


def parameters_of(make_model: Callable[..., nn.Module]) -> tuple[int, int]:
    """Of a model for ImageNet: all parameters, and those of fully connected layers (nn.Linear).

    Args:
        make_model: called with image_shape and num_classes. Nothing is allocated.
    """
    with torch.device("meta"):
        model = make_model(**IMAGENET)
    fc = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    of_fc = sum(each.numel() for layer in fc for each in layer.parameters())
    return sum(each.numel() for each in model.parameters()), of_fc
