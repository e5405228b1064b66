"""Winograd's minimal filtering: fewer multiplications, for small filters of one size at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lab.convolution.algorithm import Algorithm, Cost
from lab.convolution.problem import VALUE_BYTES, Pass, Problem

CPU = torch.device("cpu")
POINTS = (0.0, 1.0, -1.0, 2.0, -2.0)  # and infinity: polynomials are evaluated there


@dataclass(frozen=True)
class Matrices:
    """The matrices of F(m, r): m outputs of a filter of r values, from n = m + r - 1 inputs.

    With input d, filter g and output y: y = output · ((kernel · g) * (input · d)).
    """

    output: Tensor  # [m, n]
    kernel: Tensor  # [n, r]
    input: Tensor  # [n, n]


@lru_cache  # on a GPU, a copy for each call would make the host wait
def matrices(
    m: int, r: int, dtype: torch.dtype = torch.float64, device: torch.device = CPU
) -> Matrices:
    """Return the matrices of F(m, r), by Cook and Toom's evaluation at POINTS.

    (A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.)
    Output and kernel matrices are powers of the points; the input matrix is the one with which the
    definition holds, y_i = Σ_k d_(i+k) g_k, which is linear in it.
    """
    n = m + r - 1
    points = np.array(POINTS[: n - 1])
    infinity = np.eye(n)[-1:]
    output = np.vstack([points**i for i in range(m)])
    output = np.hstack([output, np.eye(m)[:, -1:]])
    scale = [np.prod([p - q for q in points if q != p]) for p in points]
    kernel = np.vstack([np.array([points**k / scale for k in range(r)]).T, infinity[:, -r:]])
    products = np.einsum("ij,jk->ikj", output, kernel).reshape(m * r, n)
    shifts = [np.eye(n)[i + k] for i in range(m) for k in range(r)]
    solved = np.linalg.lstsq(products, np.array(shifts), rcond=None)[0]
    found = (output, kernel, np.round(solved, 9))
    return Matrices(*(torch.from_numpy(each).to(device, dtype) for each in found))


class Winograd(Algorithm):
    """F(m x m, r x r): each tile of m x m outputs takes n² products per pair of channels.

    (Lavin and Gray 2016, algorithm 1.) Backward data is a convolution with the turned filters;
    backward weights is F(r x r, m x m), with the tiles of the output's gradient as filters.

    Args:
        m: side of an output tile. r: side of the filter.
    """

    def __init__(self, m: int, r: int) -> None:
        self.m, self.r, self.n = m, r, m + r - 1
        if self.n - 1 > len(POINTS):
            raise ValueError(f"winograd: tiles of {self.n} need {self.n - 1} points")
        self.name = f"winograd{m}x{r}"

    def refusal(self, problem: Problem, which: Pass) -> str | None:
        """Refuse strides, and filters of another size."""
        if problem.kernel != (self.r, self.r):
            return f"kernel {problem.kernel}: must be ({self.r}, {self.r})"
        if problem.stride != (1, 1):
            return f"stride {problem.stride}: must be (1, 1)"
        if which == Pass.BACKWARD_DATA and max(problem.padding) >= self.r:
            return f"padding {problem.padding}: must be below {self.r}"
        return None

    def cost(self, problem: Problem, which: Pass) -> Cost:
        """Count the products of all tiles, and the transforms as dense matrix products."""
        m, r, n = self.m, self.r, self.n
        turned = which == Pass.BACKWARD_DATA
        tiles = problem.batch * _tiles(problem.size if turned else problem.out_size, m)
        channels, filters = problem.channels, problem.filters
        pairs = channels * filters
        if turned:
            channels, filters = filters, channels
        products = 2 * n * n * pairs * tiles
        inputs = channels * tiles * 4 * n**3
        if which == Pass.BACKWARD_WEIGHTS:
            kernels = filters * tiles * 2 * (n * m * m + n * n * m)
            outputs = pairs * 2 * (r * n * n + r * r * n)
        else:
            kernels = pairs * 2 * (n * r * r + n * n * r)
            outputs = filters * tiles * 2 * (m * n * n + m * m * n)
        values = n * n * (pairs + (channels + filters) * tiles)
        return Cost(products + inputs + kernels + outputs, VALUE_BYTES * values)

    def _forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        return self._filtered(x, w, problem.padding, problem.out_size)

    def _backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        turned = w.flip(2, 3).transpose(0, 1)
        padding = self.r - 1 - problem.padding[0], self.r - 1 - problem.padding[1]
        return self._filtered(dy, turned, padding, problem.size)

    def _filtered(
        self, x: Tensor, w: Tensor, padding: tuple[int, int], size: tuple[int, int]
    ) -> Tensor:
        """Return [N, K, *size]: the filters w [K, C, r, r] over x [N, C, H, W]."""
        use = matrices(self.m, self.r, x.dtype, x.device)
        tiles = _cut(_covering(x, padding, size, self.m, self.n), self.n, self.m)
        inputs = _both_sides(use.input, tiles)  # [N, C, tall, wide, n, n]
        kernels = _both_sides(use.kernel, w)  # [K, C, n, n]
        products = torch.einsum("kcij,nctuij->nktuij", kernels, inputs)
        y = _both_sides(use.output, products)  # [N, K, tall, wide, m, m]
        y = y.transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return y[..., : size[0], : size[1]]

    def _backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
        use = matrices(self.r, self.m, x.dtype, x.device)
        size = problem.out_size
        inputs = _cut(_covering(x, problem.padding, size, self.m, self.n), self.n, self.m)
        filters = _cut(_covering(dy, (0, 0), size, self.m, self.m), self.m, self.m)
        inputs, filters = _both_sides(use.input, inputs), _both_sides(use.kernel, filters)
        return _both_sides(use.output, torch.einsum("nktuij,nctuij->kcij", filters, inputs))


def _tiles(size: tuple[int, int], m: int) -> int:
    return -(-size[0] // m) * -(-size[1] // m)


def _covering(x: Tensor, padding: tuple[int, int], size: tuple[int, int], m: int, n: int) -> Tensor:
    """Pad x so that tiles of n, every m, yield at least `size` outputs."""
    down, right = (
        -(-out // m) * m + n - m - side - before
        for out, side, before in zip(size, x.shape[2:], padding, strict=True)
    )
    return pad(x, (padding[1], right, padding[0], down))


def _cut(x: Tensor, n: int, m: int) -> Tensor:
    """Return the tiles of n x n, every m: [N, C, tall, wide, n, n], a view."""
    return x.unfold(2, n, m).unfold(3, n, m)


def _both_sides(matrix: Tensor, tiles: Tensor) -> Tensor:
    """Return M · tile · Mᵀ for the last two dimensions."""
    return matrix @ tiles @ matrix.T
