"""A convolution layer whose three passes may each have an algorithm of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from lab.convolution.algorithms import LIBRARY
from lab.convolution.choice import Chooser, Chosen
from lab.convolution.problem import Pass, Problem

Method = TypeVar("Method", bound=Callable[..., Any])


def _eager(method: Method) -> Method:
    """Keep a method out of compiled graphs."""
    return cast(Method, torch.compiler.disable(method))


class ChosenConv2d(nn.Module):
    """A Conv2d with the same parameters, computed by chosen algorithms.

    It chooses at its first forward of each shape. Where the library is chosen for all passes, its
    own fused forward and backward run, as in a Conv2d. On the meta device and in half precision,
    too, because the algorithms compute in float32.

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
        chosen = self.chosen[problem]
        if all(algorithm is LIBRARY for algorithm in chosen.values()):
            return self._by_library(x)
        y: Any = _Passes.apply(x, self.weight, problem, chosen)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)

    def _by_library(self, x: Tensor) -> Tensor:
        return conv2d(x, self.weight, self.bias, self.stride, self.padding, 1, self.groups)


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, problem: Problem, chosen: Chosen) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.problem, ctx.chosen = problem, chosen
        return chosen[Pass.FORWARD].forward(x, w, problem)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        problem, chosen, dy = ctx.problem, ctx.chosen, dy.contiguous()
        wants_dx, wants_dw, *_ = ctx.needs_input_grad
        dx = chosen[Pass.BACKWARD_DATA].backward_data(dy, w, problem) if wants_dx else None
        dw = chosen[Pass.BACKWARD_WEIGHTS].backward_weights(dy, x, problem) if wants_dw else None
        return dx, dw, None, None


def _pair(value: tuple[int, ...]) -> tuple[int, int]:
    down, across = value
    return down, across
