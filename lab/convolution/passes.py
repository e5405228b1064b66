"""One convolution, each of its three passes by an algorithm of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from lab.convolution.algorithm import Algorithm
from lab.convolution.algorithms import LIBRARY
from lab.convolution.problem import Pass, Problem

Chosen = Mapping[Pass, Algorithm]


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, problem: Problem, chosen: Chosen) -> Tensor:
    """Return [N, K, H', W'] for x [N, C, H, W], w [K, C / groups, R, S] and bias [K].

    Where the library is chosen for all passes, its own fused forward and backward run.
    """
    if all(algorithm is LIBRARY for algorithm in chosen.values()):
        return conv2d(x, w, bias, problem.stride, problem.padding, 1, problem.groups)
    return _Passes.apply(x, w, bias, problem, chosen)  # pyright: ignore[reportReturnType]


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, problem: Problem, chosen: Chosen
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.problem, ctx.chosen = problem, chosen
        y = chosen[Pass.FORWARD].forward(x, w, problem)
        return y if bias is None else y.add_(bias.view(-1, 1, 1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        problem, chosen, dy = ctx.problem, ctx.chosen, dy.contiguous()
        wants_dx, wants_dw, wants_db, *_ = ctx.needs_input_grad
        dx = chosen[Pass.BACKWARD_DATA].backward_data(dy, w, problem) if wants_dx else None
        dw = chosen[Pass.BACKWARD_WEIGHTS].backward_weights(dy, x, problem) if wants_dw else None
        return dx, dw, dy.sum((0, 2, 3)) if wants_db else None, None, None
