"""Direct convolution: a sum over the positions of the filter, without a workspace."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from lab.convolution.algorithm import Algorithm, Cost
from lab.convolution.problem import VALUE_BYTES, Pass, Problem


class Direct(Algorithm):
    """Add up what each position of the filter contributes (Kim et al. 2017, slide 32).

    At one position the pixels of the input that it meets form a view, and what remains is a product
    over channels.
    """

    name = "direct"

    def cost(self, problem: Problem, which: Pass) -> Cost:
        """Return the operations of the definition; the workspace is the padded input."""
        height, width = problem.padded
        padded = problem.batch * problem.channels * height * width if any(problem.padding) else 0
        return Cost(problem.operations, VALUE_BYTES * padded)

    def _forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        y = x.new_zeros(problem.batch, problem.filters, problem.out_pixels)
        for (r, s), seen in _positions(_padded(x, problem), problem):
            y += torch.matmul(w[:, :, r, s], seen.flatten(2))
        return y.unflatten(2, problem.out_size)

    def _backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        padded = dy.new_zeros(problem.batch, problem.channels, *problem.padded)
        for (r, s), seen in _positions(padded, problem):
            seen += torch.matmul(w[:, :, r, s].T, dy.flatten(2)).unflatten(2, problem.out_size)
        return cropped(padded, problem)

    def _backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
        dw = dy.new_empty(problem.filters, problem.channels, *problem.kernel)
        for (r, s), seen in _positions(_padded(x, problem), problem):
            torch.sum(torch.matmul(dy.flatten(2), seen.flatten(2).mT), 0, out=dw[:, :, r, s])
        return dw


def cropped(padded: Tensor, problem: Problem) -> Tensor:
    """Return the part of [N, C, height, width] that is no padding."""
    (top, left), (height, width) = problem.padding, problem.size
    return padded[:, :, top : top + height, left : left + width]


def _padded(x: Tensor, problem: Problem) -> Tensor:
    (top, left) = problem.padding
    return pad(x, (left, left, top, top)) if top or left else x


def _positions(padded: Tensor, problem: Problem) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield each position of the filter with a view of the pixels that it meets, [N, C, H', W']."""
    (height, width), (down, across) = problem.out_size, problem.stride
    for r in range(problem.kernel[0]):
        for s in range(problem.kernel[1]):
            rows = slice(r, r + down * (height - 1) + 1, down)
            columns = slice(s, s + across * (width - 1) + 1, across)
            yield (r, s), padded[:, :, rows, columns]
