"""Convolution by Fourier transforms: a product for each frequency."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from lab.convolution.algorithm import Algorithm, Cost
from lab.convolution.direct import cropped
from lab.convolution.problem import Pass, Problem

COMPLEX_BYTES = 8
COMPLEX_OPERATIONS = 8  # four products, four additions
FACTORS = (2, 3, 5)  # lengths of these factors are transformed fast


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

    def cost(self, problem: Problem, which: Pass) -> Cost:
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
        return Cost(
            transforms + COMPLEX_OPERATIONS * products, COMPLEX_BYTES * planes * frequencies
        )

    def _forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        images, filters = _images(x, problem), _spectrum(w, problem)
        y = torch.einsum("nc...,kc...->nk...", images, filters.conj())
        height, width = problem.out_size
        return _signal(y, problem)[..., :height, :width]

    def _backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        outputs, filters = _spectrum(dy, problem), _spectrum(w, problem)
        padded = _signal(torch.einsum("nk...,kc...->nc...", outputs, filters), problem)
        return cropped(padded, problem)

    def _backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
        images, outputs = _images(x, problem), _spectrum(dy, problem)
        dw = torch.einsum("nc...,nk...->kc...", images, outputs.conj())
        height, width = problem.kernel
        return _signal(dw, problem)[..., :height, :width]


def _lengths(problem: Problem) -> tuple[int, int]:
    """Return the lengths of the transforms: the next after the padded image that are fast."""
    height, width = (next(n for n in range(p, 2 * p + 1) if _fast(n)) for p in problem.padded)
    return height, width


def _fast(length: int) -> bool:
    for factor in FACTORS:
        while length % factor == 0:
            length //= factor
    return length == 1


def _images(x: Tensor, problem: Problem) -> Tensor:
    top, left = problem.padding
    return _spectrum(pad(x, (left, 0, top, 0)), problem)


def _spectrum(planes: Tensor, problem: Problem) -> Tensor:
    return torch.fft.rfft2(planes, s=_lengths(problem))


def _signal(spectrum: Tensor, problem: Problem) -> Tensor:
    return torch.fft.irfft2(spectrum, s=_lengths(problem))
