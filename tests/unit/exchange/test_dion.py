"""Dion among ranks against its text in one process."""

from __future__ import annotations

from functools import partial
from math import ceil, prod

import pytest
import torch
from torch import Tensor

from lab.codec.low_rank import random_factor
from lab.exchange.dion import Dion
from tests.support.directions import deliver
from tests.unit.exchange.test_muon import gradients

MATRICES = {"wide": (24, 50), "tall": (60, 20), "square": (16, 16)}


def by_the_text(given: Tensor, fraction: float, mu: float = 0.95) -> Tensor:
    """Return the directions [steps, values] that Dion's algorithm gives in float64 on one rank."""
    cpu, directions = torch.device("cpu"), []
    qs = {
        name: random_factor(name, ceil(fraction * min(shape)), shape[1], cpu).double().T
        for name, shape in MATRICES.items()
    }
    momenta = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in MATRICES.items()}
    sizes = [prod(shape) for shape in MATRICES.values()]
    for gradient in given.double():
        step = []
        for (name, shape), part in zip(MATRICES.items(), gradient.split(sizes), strict=True):
            m = momenta[name] + part.view(shape)
            p = torch.linalg.qr(m @ qs[name]).Q
            r = m.T @ p
            momenta[name] = m - (1 - mu) * p @ r.T
            qs[name] = r / r.norm(dim=0)
            step.append(0.2 * max(shape) ** 0.5 * (p @ qs[name].T).flatten())
        directions.append(torch.cat(step))
    return torch.stack(directions)


@pytest.mark.parametrize("fraction", [0.25, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_follow_the_text_on_the_mean_gradient(size: int, fraction: float) -> None:
    given = gradients(8, size, MATRICES)
    ranks = deliver(partial(Dion, fraction), MATRICES, given)[0].directions.double()
    expected = by_the_text(given.mean(dim=1), fraction)
    assert (ranks - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("size", [2, 4])
def test_sends_the_bytes_of_its_factors_in_two_all_reduces(size: int) -> None:
    shapes = {"a": (64, 192), "b": (256, 64), "norm": (64,)}
    ledger = deliver(Dion, shapes, gradients(2, size, shapes))[0]
    factors = 16 * (64 + 192) + 16 * (256 + 64)
    assert ledger.payload[1] == pytest.approx(8 * (factors + 64) * (size - 1) / size, abs=64)
    exact = deliver(Dion, {"norm": (64,)}, gradients(2, size, {"norm": (64,)}))[0]
    assert ledger.messages[1] == 2 * exact.messages[1]


def test_momentum_of_rank_one_gives_a_direction_of_rank_one() -> None:
    """Columns of P that hold rounding alone are not scaled up to a direction."""
    shape = {"w": (24, 50)}
    given = torch.outer(torch.randn(24), torch.randn(50)).flatten().expand(4, 2, -1)
    for direction in deliver(Dion, shape, given)[0].directions:
        values = torch.linalg.svdvals(direction.view(24, 50)) / (0.2 * 50**0.5)
        torch.testing.assert_close(values, torch.eye(24)[0], rtol=1e-4, atol=1e-4)


def test_a_matrix_without_a_gradient_stays_until_it_has_one() -> None:
    given = gradients(4, 2, MATRICES)
    given[:2] = 0
    directions = deliver(Dion, MATRICES, given)[0].directions
    assert not directions[:2].any()
    torch.testing.assert_close(
        directions[2:], deliver(Dion, MATRICES, given[2:])[0].directions, rtol=1e-4, atol=1e-5
    )
