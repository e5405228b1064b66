"""The convolutions of a model, as problems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lab.convolution.layer import ChosenConv2d
from lab.convolution.problem import Problem


def convolutions_of(
    model: nn.Module, input_shape: tuple[int, ...], input_dtype: torch.dtype, batch: int
) -> dict[str, Problem]:
    """Return the problem of each convolution that the algorithms know, in the order of forward.

    Nothing is computed: the model runs on torch's meta device. A layer that is called several times
    counts once, as it was called last.

    Args:
        model: on the meta device.
        input_shape, input_dtype: of one sample.
    """
    found: dict[str, Problem] = {}
    with torch.no_grad(), _noting(model, found):
        model(torch.zeros(batch, *input_shape, dtype=input_dtype, device="meta"))
    return found


@contextmanager
def _noting(model: nn.Module, found: dict[str, Problem]) -> Iterator[None]:
    """Note the problem of each convolution that the model calls meanwhile."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if ChosenConv2d.can_replace(module):
                hook = module.register_forward_pre_hook(partial(_note, found, name))
                stack.callback(hook.remove)
        yield


def _note(found: dict[str, Problem], name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    assert isinstance(layer, nn.Conv2d) and not isinstance(layer.padding, str)
    stride, padding = layer.stride, layer.padding
    found[name] = Problem.of(
        inputs[0], layer.weight, (stride[0], stride[1]), (padding[0], padding[1]), layer.groups
    )
