"""A convolution layer whose three passes may each have an algorithm of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from lab.convolution.choice import Chooser
from lab.convolution.passes import Chosen, convolve
from lab.convolution.problem import Problem

Method = TypeVar("Method", bound=Callable[..., Any])


def _eager(method: Method) -> Method:
    """Keep a method out of compiled graphs."""
    return cast(Method, torch.compiler.disable(method))


class ChosenConv2d(nn.Module):
    """A Conv2d with the same parameters, computed by chosen algorithms.

    It chooses at its first forward of each shape; see `convolve`. On the meta device and in half
    precision it is a Conv2d, because the algorithms compute in float32.

    Args:
        layer: see `can_replace`; its parameters are shared.
        choose: for a problem, its input and filters.
    """

    def __init__(self, layer: nn.Conv2d, choose: Chooser) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.stride, self.groups = _pair(layer.stride), layer.groups
        assert not isinstance(layer.padding, str)
        self.padding = _pair(layer.padding)
        self.chosen: dict[Problem, Chosen] = {}
        self._choose = choose

    @staticmethod
    def can_replace(layer: nn.Module) -> bool:
        """Tell whether a module is a convolution that algorithms know: zeros around, no gaps."""
        return (
            isinstance(layer, nn.Conv2d)
            and not isinstance(layer.padding, str)
            and layer.padding_mode == "zeros"
            and layer.dilation == (1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, K, H', W'] for x [N, C, H, W]."""
        device = x.device.type
        if device == "meta" or x.dtype != torch.float32 or torch.is_autocast_enabled(device):
            return self._by_library(x)
        return self._by_choice(x)

    @_eager  # trials and choices are no part of a graph
    def _by_choice(self, x: Tensor) -> Tensor:
        problem = Problem.of(x, self.weight, self.stride, self.padding, self.groups)
        if problem not in self.chosen:
            self.chosen[problem] = self._choose(problem, x, self.weight)
        return convolve(x, self.weight, self.bias, problem, self.chosen[problem])

    def _by_library(self, x: Tensor) -> Tensor:
        return conv2d(x, self.weight, self.bias, self.stride, self.padding, 1, self.groups)


def _pair(value: tuple[int, ...]) -> tuple[int, int]:
    down, across = value
    return down, across
