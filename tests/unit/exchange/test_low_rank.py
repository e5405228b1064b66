"""PowerSGD's products: the kernels against float64 arithmetic, at each level."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codec.layout import Factors
from lab.exchange.powersgd import HIGHEST_RANK, LowRankReference, NativeLowRank, factor_kernels
from tests.support.kernels import HERE, LEVELS, OnGPU, library_at
from tests.support.slow import some_of

SHAPES = [(0, 3), (1, 1), (3, 7), (64, 33), (300, 1000), (10, 9000), (5000, 10)]
RANKS = [1, 2, 3, 4]
CASES = [
    *product([HERE, "reference"], SHAPES, RANKS),
    *some_of(
        product([level for level in LEVELS if level != HERE], SHAPES, RANKS),
        also=product(LEVELS, SHAPES, [2]),
    ),
    *some_of(
        product(["triton"], [(0, 3), (1, 1), (6, 7), (5, 528)], RANKS),
        also=[("triton", (0, 3), 2), ("triton", (6, 7), 3), ("triton", (5, 528), 4)],
    ),
    ("triton", (520, 17), 2),  # interpreters are slow; more rows than a program takes
]
CPU = torch.device("cpu")


def alone(rows: int, columns: int, rank: int) -> Factors:
    """Return the places of one matrix and its factors."""
    return Factors([(0, rows, columns, rank)])


def implementation(level: str) -> Any:
    if level == "triton":
        return OnGPU(pytest.importorskip("lab.codec.gpu_low_rank", reason="no triton here").made())
    return (
        LowRankReference() if level == "reference" else NativeLowRank(library_at(level, "low_rank"))
    )


def near(ours: Tensor, true: Tensor, sizes: Tensor, level: str) -> bool:
    """Compare to 1e-6 of the sum of magnitudes of each value's terms.

    The reference calls torch's BLAS, which on some CPUs adds 5000 terms one after another.
    """
    tolerance = 1e-5 if level == "reference" else 1e-6
    return bool(((ours.double() - true).abs() <= tolerance * sizes).all())


@pytest.mark.parametrize(("level", "shape", "rank"), CASES)
def test_products_are_those_of_float64(level: str, shape: tuple[int, int], rank: int) -> None:
    codec, (rows, columns) = implementation(level), shape
    gradient, residual, q = torch.randn(shape), torch.randn(shape), torch.randn(rank, columns)
    p, back, out = torch.empty(rows, rank), torch.empty(rank, columns), torch.full(shape, 7.0)
    matrix, true = residual.clone(), (residual + gradient).double()
    one = alone(rows, columns, rank)
    codec.project(one, gradient, matrix, q, p)
    assert torch.equal(matrix, residual + gradient)
    assert near(p, true @ q.T.double(), true.abs() @ q.T.double().abs(), level)
    codec.project_back(one, matrix, p, back, False)
    assert torch.equal(matrix, residual + gradient)
    assert near(back, p.T.double() @ true, p.T.double().abs() @ true.abs(), level)
    codec.project_back(one, matrix, p, back, True)
    mean, sizes = p.double() @ back.double(), p.double().abs() @ back.double().abs()
    assert near(matrix, true - mean, sizes + true.abs(), level)
    codec.rebuild(one, p, back, out)
    assert near(out, mean, sizes, level)


@pytest.mark.parametrize("level", LEVELS)
def test_without_feedback_the_gradient_is_the_matrix(level: str) -> None:
    gradient, q, p = torch.randn(9, 70), torch.randn(2, 70), torch.empty(9, 2)
    kept = gradient.clone()
    implementation(level).project(alone(9, 70, 2), gradient, None, q, p)
    assert torch.equal(gradient, kept)
    torch.testing.assert_close(p, gradient @ q.T)


def test_all_levels_and_threads_rebuild_the_same_bits() -> None:
    """Ranks rely on it: each rebuilds the mean by itself."""
    p, q = torch.randn(700, 2), torch.randn(2, 1003)
    before, results = torch.get_num_threads(), []
    for level in LEVELS[: LEVELS.index(HERE) + 1]:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out = torch.empty(700, 1003)
            implementation(level).rebuild(alone(700, 1003, 2), p, q, out)
            results.append(out)
    torch.set_num_threads(before)
    assert all(torch.equal(out, results[0]) for out in results)


def test_threads_change_no_bit_of_a_projection() -> None:
    gradient, q, p = torch.randn(700, 1003), torch.randn(2, 1003), torch.randn(700, 2)
    before, results = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        forth, back, rest = torch.empty(700, 2), torch.empty(2, 1003), gradient.clone()
        one = alone(700, 1003, 2)
        factor_kernels(CPU, 2).project(one, gradient, None, q, forth)
        factor_kernels(CPU, 2).project_back(one, rest, p, back, True)
        results.append((forth, back, rest))
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_more_columns_than_the_kernels_take_go_to_blas() -> None:
    rank = HIGHEST_RANK + 1
    gradient, q, p = torch.randn(20, 30), torch.randn(rank, 30), torch.empty(20, rank)
    factor_kernels(CPU, len(q)).project(alone(20, 30, rank), gradient, None, q, p)
    torch.testing.assert_close(p, gradient @ q.T)


@pytest.mark.parametrize("level", [*LEVELS, "triton", "reference"])
def test_all_matrices_of_a_bucket_are_as_each_alone(level: str) -> None:
    """Their factors lie in another order, with other values between the matrices."""
    codec, shapes = implementation(level), {7: (5, 40, 1), 400: (9, 70, 2), 2000: (5, 33, 4)}
    order = [2000, 7, 400]
    factors = Factors([(start, *shapes[start]) for start in order])
    gradients, residuals = torch.randn(2, 3000)
    q = torch.randn(factors.num_q)
    p, back, out = torch.empty(factors.num_p), torch.empty(factors.num_q), torch.randn(3000)
    kept, untouched = residuals.clone(), out.clone()
    codec.project(factors, gradients, residuals, q, p)
    codec.orthonormalise(factors, p, factors.ps(p))
    codec.project_back(factors, residuals, p, back, True)
    codec.rebuild(factors, p, back, out)
    covered = torch.zeros(3000, dtype=torch.bool)
    for place, start in enumerate(order):
        rows, columns, rank = shapes[start]
        one, span = alone(rows, columns, rank), slice(start, start + rows * columns)
        covered[span] = True
        own, left, right = kept[span].clone(), torch.empty(rows, rank), torch.empty(rank, columns)
        mean = torch.empty(rows, columns)
        codec.project(one, gradients[span], own, factors.qs(q)[place], left)
        codec.orthonormalise(one, left, [left])
        codec.project_back(one, own, left, right, True)
        codec.rebuild(one, left, right, mean)
        torch.testing.assert_close(factors.ps(p)[place], left)
        torch.testing.assert_close(factors.qs(back)[place], right)
        torch.testing.assert_close(residuals[span], own)
        torch.testing.assert_close(out[span], mean.flatten())
    assert torch.equal(out[~covered], untouched[~covered])
    assert torch.equal(residuals[~covered], kept[~covered])


def test_what_is_not_finite_reaches_every_column_of_its_row() -> None:
    gradient, q, p = torch.randn(9, 70), torch.randn(2, 70), torch.empty(9, 2)
    gradient[4, 66] = torch.nan
    factor_kernels(CPU, len(q)).project(alone(9, 70, 2), gradient, None, q, p)
    assert p.isfinite().all(dim=1).tolist() == [row != 4 for row in range(9)]


BASES = ["normal", "tiny", "huge", "zero", "alike", "first row zero"]


@pytest.mark.parametrize(
    ("level", "kind", "rank"),
    [
        *product(["reference"], BASES, RANKS),
        *some_of(product(["triton"], BASES, RANKS), also=product(["triton"], BASES, [3])),
    ],
)
def test_a_factor_becomes_an_orthonormal_basis(level: str, kind: str, rank: int) -> None:
    for rows in (rank + 1, 9, 1030):
        p = torch.randn(rows, rank) * {"tiny": 1e-30, "huge": 1e30, "zero": 0.0}.get(kind, 1.0)
        if kind == "alike":
            p = p[:, :1].repeat(1, rank).contiguous()
        if kind == "first row zero":
            p[0] = 0
        factors, basis = alone(rows, 7, rank), p.clone()
        implementation(level).orthonormalise(factors, basis, [basis])
        # Of columns that are alike, all but rounding errors cancel, and CPUs round differently.
        torch.testing.assert_close(basis.T @ basis, torch.eye(rank), rtol=0, atol=1e-5)
        scaled = p / p.abs().max().clamp(min=1e-37)
        torch.testing.assert_close(basis @ (basis.T @ scaled), scaled, rtol=0, atol=2e-5)


def test_a_factor_that_is_not_finite_has_no_finite_basis() -> None:
    p = torch.randn(40, 2)
    p[7, 1] = torch.nan
    implementation("triton").orthonormalise(alone(40, 7, 2), p, [p])
    assert not p.isfinite().all()
