"""The library's own convolution: oneDNN on CPUs, cuDNN on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from lab.convolution.algorithm import Algorithm, Cost
from lab.convolution.problem import Pass, Problem


class Library(Algorithm):
    """Leave the choice to the library. Groups are passed on to it."""

    name = "library"

    def cost(self, problem: Problem, which: Pass) -> Cost:
        """Return the operations of the definition; what the library executes is not known."""
        return Cost(problem.operations, 0)

    def forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        """See Algorithm.forward."""
        return conv2d(x, w, None, problem.stride, problem.padding, 1, problem.groups)

    def backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        """See Algorithm.backward_data."""
        x = dy.new_empty(problem.batch, problem.channels, *problem.size)
        return self._backward(dy, x, w, problem, (True, False, False))[0]

    def backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
        """See Algorithm.backward_weights."""
        shape = problem.filters, problem.channels // problem.groups, *problem.kernel
        return self._backward(dy, x, dy.new_empty(shape), problem, (False, True, False))[1]

    def _backward(
        self, dy: Tensor, x: Tensor, w: Tensor, problem: Problem, mask: tuple[bool, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten.convolution_backward(
            *(dy, x, w, None, problem.stride, problem.padding, (1, 1)),
            *(False, (0, 0), problem.groups, mask),
        )

    _forward, _backward_data, _backward_weights = forward, backward_data, backward_weights
