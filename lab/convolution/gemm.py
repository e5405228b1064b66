"""Convolution as one matrix product: the image is unrolled into columns (im2col)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import fold, unfold

from lab.convolution.algorithm import Algorithm, Cost
from lab.convolution.problem import VALUE_BYTES, Pass, Problem


class Gemm(Algorithm):
    """Unroll each image into a matrix, as Caffe does; the three passes are alike.

    (K. Chellapilla, S. Puri and P. Simard, High Performance Convolutional Neural Networks for
    Document Processing, 2006, section 3; Kim et al. 2017, slide 33.)

    Args:
        tile: rows and columns of the product that a kernel computes at once. Matrices are filled up
            to whole tiles, which adds operations.
    """

    name = "gemm"

    def __init__(self, tile: tuple[int, int] = (1, 1)) -> None:
        self.tile = tile

    def cost(self, problem: Problem, which: Pass) -> Cost:
        """Count whole tiles; the workspace holds the columns of all images."""
        taps = problem.channels * problem.kernel[0] * problem.kernel[1]
        pixels = problem.batch * problem.out_pixels
        rows, columns, depth = {
            Pass.FORWARD: (problem.filters, pixels, taps),
            Pass.BACKWARD_DATA: (taps, pixels, problem.filters),
            Pass.BACKWARD_WEIGHTS: (problem.filters, taps, pixels),
        }[which]
        operations = 2 * _up(rows, self.tile[0]) * _up(columns, self.tile[1]) * depth
        return Cost(operations, VALUE_BYTES * taps * pixels)

    def _forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        y = torch.matmul(w.flatten(1), _columns(x, problem))
        return y.unflatten(2, problem.out_size)

    def _backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        columns = torch.matmul(w.flatten(1).T, dy.flatten(2))
        return fold(
            columns, problem.size, problem.kernel, padding=problem.padding, stride=problem.stride
        )

    def _backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
        per_image = torch.matmul(dy.flatten(2), _columns(x, problem).mT)
        return per_image.sum(0).view(problem.filters, problem.channels, *problem.kernel)


def _columns(x: Tensor, problem: Problem) -> Tensor:
    """Return the unrolled images [N, C·R·S, H'·W']."""
    return unfold(x, problem.kernel, padding=problem.padding, stride=problem.stride)


def _up(length: int, tile: int) -> int:
    return -(-length // tile) * tile
