"""All algorithms of a convolution: the library's own, direct, GEMM, FFT and Winograd's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy.fft import next_fast_len
from torch import Tensor
from torch.nn.functional import conv2d, fold, pad, unfold

from lab.convolution import VALUE_BYTES, Algorithm, AlgorithmCost, Pass, Problem

CPU = torch.device("cpu")
COMPLEX_BYTES = 8
COMPLEX_OPERATIONS = 8  # four products, four additions
POINTS = (0.0, 1.0, -1.0, 2.0, -2.0)  # and infinity: polynomials are evaluated there


class Library(Algorithm):
    """Leave the choice to the library. Groups are passed on to it."""

    name = "library"

    def cost(self, problem: Problem, which: Pass) -> AlgorithmCost:
        """Return the operations of the definition; what the library executes is not known."""
        return AlgorithmCost(problem.operations, 0)

    def compute(self, which: Pass, a: Tensor, b: Tensor, problem: Problem) -> Tensor:
        return getattr(self, which.replace(" ", "_"))(a, b, problem)

    def forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        return conv2d(x, w, None, problem.stride, problem.padding, 1, problem.groups)

    def backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        x = dy.new_empty(problem.batch, problem.channels, *problem.size)
        return gradients(problem, dy, x, w, (True, False, False))[0]

    def backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
        w = dy.new_empty(problem.filters, problem.channels // problem.groups, *problem.kernel)
        return gradients(problem, dy, x, w, (False, True, False))[1]


def gradients(
    problem: Problem, dy: Tensor, x: Tensor, w: Tensor, mask: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the library's gradients of input and filters, where the mask asks for them."""
    return torch.ops.aten.convolution_backward(
        *(dy, x, w, None, problem.stride, problem.padding, (1, 1)),
        *(False, (0, 0), problem.groups, mask),
    )


class Direct(Algorithm):
    """Add up what each position of the filter contributes (Kim et al. 2017, slide 32).

    At one position the pixels of the input that it meets form a view, and what remains is a product
    over channels.
    """

    name = "direct"

    def cost(self, problem: Problem, which: Pass) -> AlgorithmCost:
        """Return the operations of the definition; the workspace is the padded input."""
        height, width = problem.padded
        padded = problem.batch * problem.channels * height * width if any(problem.padding) else 0
        return AlgorithmCost(problem.operations, VALUE_BYTES * padded)

    def forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        y = x.new_zeros(problem.batch, problem.filters, problem.out_pixels)
        for (r, s), seen in _positions(_padded(x, problem), problem):
            y += torch.matmul(w[:, :, r, s], seen.flatten(2))
        return y.unflatten(2, problem.out_size)

    def backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        padded = dy.new_zeros(problem.batch, problem.channels, *problem.padded)
        for (r, s), seen in _positions(padded, problem):
            seen += torch.matmul(w[:, :, r, s].T, dy.flatten(2)).unflatten(2, problem.out_size)
        return cropped(padded, problem)

    def backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
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

    def cost(self, problem: Problem, which: Pass) -> AlgorithmCost:
        """Count whole tiles; the workspace holds the columns of all images."""
        taps = problem.channels * problem.kernel[0] * problem.kernel[1]
        pixels = problem.batch * problem.out_pixels
        rows, columns, depth = {
            Pass.FORWARD: (problem.filters, pixels, taps),
            Pass.BACKWARD_DATA: (taps, pixels, problem.filters),
            Pass.BACKWARD_WEIGHTS: (problem.filters, taps, pixels),
        }[which]
        operations = 2 * _up(rows, self.tile[0]) * _up(columns, self.tile[1]) * depth
        return AlgorithmCost(operations, VALUE_BYTES * taps * pixels)

    def forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        y = torch.matmul(w.flatten(1), _columns(x, problem))
        return y.unflatten(2, problem.out_size)

    def backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        columns = torch.matmul(w.flatten(1).T, dy.flatten(2))
        return fold(
            columns, problem.size, problem.kernel, padding=problem.padding, stride=problem.stride
        )

    def backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
        per_image = torch.matmul(dy.flatten(2), _columns(x, problem).mT)
        return per_image.sum(0).view(problem.filters, problem.channels, *problem.kernel)


def _columns(x: Tensor, problem: Problem) -> Tensor:
    """Return the unrolled images [N, C·R·S, H'·W']."""
    return unfold(x, problem.kernel, padding=problem.padding, stride=problem.stride)


def _up(length: int, tile: int) -> int:
    return -(-length // tile) * tile


class FFT(Algorithm):
    """Transform images and filters, multiply them frequency by frequency, transform back.

    (M. Mathieu, M. Henaff and Y. LeCun, Fast Training of Convolutional Networks through FFTs, 2014;
    Kim et al. 2017, slides 9 and 34.) The cost does not depend on the size of the filter. No
    output wraps around, because the transform is as long as the padded image.
    """

    name = "fft"

    def refusal(self, problem: Problem, which: Pass) -> str | None:
        """Refuse strides, as cuDNN does: most of the computed outputs would be thrown away."""
        return None if problem.stride == (1, 1) else f"stride {problem.stride}: must be (1, 1)"

    def cost(self, problem: Problem, which: Pass) -> AlgorithmCost:
        """Count transforms at 2.5·P·log₂P operations for P real values, and the products."""
        height, width = _lengths(problem)
        frequencies = height * (width // 2 + 1)
        planes = (
            problem.batch * problem.channels
            + problem.filters * problem.channels
            + problem.batch * problem.filters
        )
        transforms = round(planes * 2.5 * height * width * math.log2(height * width))
        products = problem.batch * problem.filters * problem.channels * frequencies
        return AlgorithmCost(
            transforms + COMPLEX_OPERATIONS * products, COMPLEX_BYTES * planes * frequencies
        )

    def forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        images, filters = _images(x, problem), _spectrum(w, problem)
        y = torch.einsum("nc...,kc...->nk...", images, filters.conj())
        height, width = problem.out_size
        return _signal(y, problem)[..., :height, :width]

    def backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        outputs, filters = _spectrum(dy, problem), _spectrum(w, problem)
        padded = _signal(torch.einsum("nk...,kc...->nc...", outputs, filters), problem)
        return cropped(padded, problem)

    def backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
        images, outputs = _images(x, problem), _spectrum(dy, problem)
        dw = torch.einsum("nc...,nk...->kc...", images, outputs.conj())
        height, width = problem.kernel
        return _signal(dw, problem)[..., :height, :width]


def _lengths(problem: Problem) -> tuple[int, int]:
    """Return the lengths of the transforms: the next after the padded image that are fast."""
    lengths: Any = (next_fast_len(side, real=True) for side in problem.padded)
    height, width = lengths
    return height, width


def _images(x: Tensor, problem: Problem) -> Tensor:
    top, left = problem.padding
    return _spectrum(pad(x, (left, 0, top, 0)), problem)


def _spectrum(planes: Tensor, problem: Problem) -> Tensor:
    return torch.fft.rfft2(planes, s=_lengths(problem))


def _signal(spectrum: Tensor, problem: Problem) -> Tensor:
    return torch.fft.irfft2(spectrum, s=_lengths(problem))


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

    def cost(self, problem: Problem, which: Pass) -> AlgorithmCost:
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
        return AlgorithmCost(products + inputs + kernels + outputs, VALUE_BYTES * values)

    def forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        return self._filtered(x, w, problem.padding, problem.out_size)

    def backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
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

    def backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
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


LIBRARY = Library()
# Winograd's are named by the sides of their tiles and filters.
ALGORITHMS: dict[str, Algorithm] = {
    each.name: each
    for each in (LIBRARY, Direct(), Gemm(), FFT(), Winograd(2, 3), Winograd(4, 3), Winograd(2, 5))
}
