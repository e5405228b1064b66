"""Every algorithm against the definition, in float64, for all three passes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.convolution.algorithms import ALGORITHMS, Gemm, matrices
from lab.convolution.problem import Pass, Problem, Unsupported

PROBLEMS = [
    Problem(2, 3, (9, 7), 4, (3, 3), padding=(1, 1)),
    Problem(3, 4, (8, 8), 6, (3, 3), padding=(0, 2), groups=2),
    Problem(2, 3, (11, 10), 5, (5, 5), padding=(2, 2)),
    Problem(1, 2, (6, 9), 3, (5, 5), padding=(0, 1)),
    Problem(2, 3, (19, 23), 4, (11, 11), stride=(4, 4), padding=(2, 2)),
    Problem(2, 4, (9, 8), 4, (3, 2), stride=(2, 3), padding=(1, 0), groups=4),
    Problem(2, 5, (4, 4), 3, (1, 1)),
    Problem(1, 1, (1, 1), 1, (1, 1)),
]
# Relative to the largest value.
TOLERANCE = {"fft": 1e-5, "winograd4x3": 1e-4, "winograd2x5": 1e-4}


class OneDevice(TorchDispatchMode):
    """Fails where an operation has operands on two devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        assert len({each.device for each in operands}) < 2, func
        return func(*args, **(kwargs or {}))


def tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Input, filters and gradient of the output."""
    group = problem.channels // problem.groups
    return (
        torch.randn(problem.batch, problem.channels, *problem.size),
        torch.randn(problem.filters, group, *problem.kernel),
        torch.randn(problem.batch, problem.filters, *problem.out_size),
    )


def defined(problem: Problem, x: Tensor, w: Tensor, dy: Tensor) -> dict[Pass, Tensor]:
    """The three passes by autograd, in float64."""
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    y = torch.nn.functional.conv2d(
        x, w, None, problem.stride, problem.padding, groups=problem.groups
    )
    y.backward(dy.double())
    assert x.grad is not None and w.grad is not None
    return dict(zip(Pass, (y.detach(), x.grad, w.grad), strict=True))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_computes_what_the_definition_says_or_refuses(name: str, problem: Problem) -> None:
    algorithm = ALGORITHMS[name]
    x, w, dy = tensors(problem)
    assert Problem.of(x, w, problem.stride, problem.padding, problem.groups) == problem
    calls = {
        Pass.FORWARD: lambda: algorithm.forward(x, w, problem),
        Pass.BACKWARD_DATA: lambda: algorithm.backward_data(dy, w, problem),
        Pass.BACKWARD_WEIGHTS: lambda: algorithm.backward_weights(dy, x, problem),
    }
    for which, expected in defined(problem, x, w, dy).items():
        reason = algorithm.refusal(problem, which)
        if reason:
            with pytest.raises(Unsupported, match=rf"^{name}, {which}: "):
                calls[which]()
            continue
        found = calls[which]()
        assert found.shape == expected.shape and found.dtype == torch.float32
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE.get(name, 2e-6), which


def test_what_is_refused_is_what_cudnn_refuses() -> None:
    strided, large = PROBLEMS[4], PROBLEMS[2]
    refused = {
        name: [bool(algorithm.refusal(problem, Pass.FORWARD)) for problem in (PROBLEMS[0], strided)]
        for name, algorithm in ALGORITHMS.items()
    }
    assert refused["direct"] == refused["gemm"] == refused["library"] == [False, False]
    assert refused["fft"] == refused["winograd4x3"] == [False, True]
    assert "must be (3, 3)" in str(ALGORITHMS["winograd2x3"].refusal(large, Pass.FORWARD))
    too_padded = replace(PROBLEMS[0], padding=(3, 3))
    assert ALGORITHMS["winograd2x3"].refusal(too_padded, Pass.BACKWARD_DATA)
    assert not ALGORITHMS["winograd2x3"].refusal(too_padded, Pass.FORWARD)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, w, _ = tensors(PROBLEMS[0])
    with pytest.raises(ValueError, match=r"input \[2, 3, 9, 7\], filters \[4, 3, 3, 3\], groups=2"):
        Problem.of(x, w, groups=2)
    with pytest.raises(ValueError, match="larger than the padded input"):
        Problem.of(x[..., :2, :2], w)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_computes_on_the_device_of_its_inputs(name: str) -> None:
    """Operands on two devices fail on a GPU; meta tensors stand for its tensors."""
    problem = PROBLEMS[0] if ALGORITHMS[name].refusal(PROBLEMS[2], Pass.FORWARD) else PROBLEMS[2]
    x, w, dy = (each.to("meta") for each in tensors(problem))
    with OneDevice():
        ALGORITHMS[name].forward(x, w, problem)
        ALGORITHMS[name].backward_data(dy, w, problem)
        ALGORITHMS[name].backward_weights(dy, x, problem)


@pytest.mark.parametrize(("m", "r"), [(2, 3), (4, 3), (2, 5), (3, 4), (3, 2)])
def test_winograds_matrices_are_those_of_the_definition(m: int, r: int) -> None:
    use = matrices(m, r)
    d, g = np.arange(1.0, m + r), np.arange(2.0, r + 2)
    kernel, inputs = use.kernel @ torch.from_numpy(g), use.input @ torch.from_numpy(d)
    assert (use.output @ (kernel * inputs)).numpy() == pytest.approx(
        np.correlate(d, g, "valid"), rel=1e-7
    )


def test_winograds_input_matrix_of_f_2_3_is_lavins() -> None:
    lavin = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
    assert matrices(2, 3).input.abs().numpy() == pytest.approx(np.abs(lavin), abs=1e-9)


# Kim et al. 2017, slide 8: conv2 of AlexNet at 256 images.
CONV2 = Problem(256, 96, (27, 27), 256, (5, 5), padding=(2, 2))


def test_operations_are_those_of_the_paper() -> None:
    assert CONV2.operations == pytest.approx(229e9, rel=0.005)
    for which in Pass:
        assert ALGORITHMS["direct"].total(CONV2, which).operations == CONV2.operations


def test_tiles_add_operations_and_winograd_saves_them() -> None:
    conv3 = Problem(256, 256, (13, 13), 384, (3, 3), padding=(1, 1))
    tiled = Gemm((128, 128)).total(conv3, Pass.FORWARD).operations
    assert tiled == 2 * 384 * 43264 * 256 * 9  # 384 filters are three tiles, 43264 pixels 338
    odd = replace(conv3, filters=400)
    assert Gemm((128, 128)).total(odd, Pass.FORWARD).operations > 1.2 * odd.operations
    for name, products in (("winograd2x3", 2 * 16 / 4), ("winograd4x3", 2 * 36 / 16)):
        # Levinthal, slide 4: fewer than the 18 operations of an output and channel.
        outputs = conv3.batch * conv3.out_pixels * conv3.filters * conv3.channels
        assert products < 18
        executed = ALGORITHMS[name].total(conv3, Pass.FORWARD).operations
        assert executed > products * outputs  # and the transforms


def test_ffts_products_do_not_depend_on_the_filters_size() -> None:
    small, large = (
        Problem(8, 64, (side, side), 64, (kernel, kernel), padding=(pad, pad))
        for side, kernel, pad in ((30, 3, 1), (22, 11, 5))
    )
    costs = [ALGORITHMS["fft"].total(each, Pass.FORWARD) for each in (small, large)]
    assert costs[0] == costs[1]
    assert large.operations > 7 * small.operations


def test_workspace_of_gemm_is_the_unrolled_batch() -> None:
    assert ALGORITHMS["gemm"].total(CONV2, Pass.FORWARD).workspace_bytes == (
        4 * 256 * 96 * 25 * 27 * 27
    )
    grouped = replace(CONV2, groups=2)
    assert math.isclose(
        ALGORITHMS["gemm"].total(grouped, Pass.FORWARD).operations, CONV2.operations / 2
    )
