"""Muon and Dion among ranks, against torch.optim.Muon and the text in one process."""

from __future__ import annotations

from functools import partial
from math import ceil, prod

import pytest
import torch
from torch import Tensor, nn

from lab.exchange.muon import Dion, Muon, balanced, newton_schulz_operations, orthogonalised
from lab.exchange.powersgd import random_factor
from tests.support.directions import adam, deliver, num_values

MATRICES = {"wide": (24, 50), "tall": (60, 20), "square": (16, 16)}


class Net(nn.Module):
    """An embedding and its head, matrices, kernels and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.hidden = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 16)])
        self.kernels = nn.Conv2d(3, 6, 3)
        self.head = nn.Linear(16, 20, bias=False)


SHAPES = {name: tuple(p.shape) for name, p in Net().named_parameters()}

HIDDEN = [*(f"hidden.{i}.weight" for i in range(3)), "kernels.weight"]


def gradients(steps: int, size: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Tensor:
    return torch.randn(steps, size, num_values(shapes))


@pytest.mark.parametrize(
    ("size", "nesterov"), [(1, True), (2, True), (3, True), (4, True), (3, False)]
)
def test_ranks_end_where_torchs_muon_ends_alone(size: int, nesterov: bool) -> None:
    given = gradients(8, size, MATRICES)
    ours = torch.randn(given.shape[2])
    theirs = [nn.Parameter(w.view(s)) for w, s in zip(cut(ours), MATRICES.values(), strict=True)]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in theirs]
    settings = {"weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = torch.optim.Muon(theirs, lr=0.002, **settings)
    make = partial(Muon, nesterov=nesterov, dtype="bfloat16")  # torch's
    for direction, gradient in zip(
        deliver(make, MATRICES, given)[0].directions, given, strict=True
    ):
        for weight, part in zip(theirs, cut(gradient.mean(dim=0)), strict=True):
            weight.grad = part.view_as(weight)
        optimizer.step()
        ours -= 0.002 * (direction + 0.1 * ours)
    expected = torch.cat([weight.detach().flatten() for weight in theirs])
    assert (ours - expected).norm() <= 1e-5 * expected.norm()


def cut(values: Tensor) -> list[Tensor]:
    return list(values.split([prod(shape) for shape in MATRICES.values()]))


def test_in_float32_ranks_equal_one_process() -> None:
    given = gradients(6, 3)
    make = partial(Muon, dtype="float32")
    ranks, alone = (deliver(make, SHAPES, g, weights=Net()) for g in (given, given.mean(1, True)))
    torch.testing.assert_close(ranks[0].directions, alone[0].directions, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", [Muon, Dion])
def test_embeddings_their_heads_and_vectors_go_by_adam(optimizer: type[Muon | Dion]) -> None:
    given = gradients(5, 2)
    directions = deliver(optimizer, SHAPES, given, weights=Net())[0].directions.double()
    by_adam = adam(given.mean(dim=1), frozen_at=5)
    start = 0
    for name, shape in SHAPES.items():
        span = slice(start, start := start + prod(shape))
        same = torch.allclose(directions[:, span], by_adam[:, span], rtol=1e-4, atol=1e-5)
        assert same == (name not in HIDDEN), name


def test_each_rank_does_its_share_of_the_products() -> None:
    blocks = {f"{i}.{n}": s for i in range(8) for n, s in {"a": (64, 192), "b": (256, 64)}.items()}
    for size in (1, 2, 4):
        exchange = deliver(Muon, blocks, gradients(1, size, blocks))[0].exchange
        (work,) = (choice["newton_schulz_operations"] for choice in exchange.choices())
        total = sum(newton_schulz_operations(*shape, steps=5) for shape in blocks.values())
        assert sum(work) == total
        assert len(work) == size
        assert max(work) <= 1.05 * total / size


def test_what_is_balanced_sends_a_rings_bytes_in_two_messages() -> None:
    blocks = {f"{i}.w": (64, 64) for i in range(8)} | {"norm": (64,)}
    for size in (2, 4):
        ledger = deliver(Muon, blocks, gradients(2, size, blocks))[0]
        ring = 8 * num_values(blocks) * (size - 1) / size
        assert ledger.payload[1] == pytest.approx(ring, rel=0.01)
        assert ledger.messages[1] == 2 * (size - 1)


def test_a_rank_keeps_the_moments_of_what_it_owns() -> None:
    blocks = {f"{i}.w": (64, 64) for i in range(8)}
    for ledger in deliver(Muon, blocks, gradients(2, 4, blocks)):
        state = ledger.exchange.state_dict()
        assert sum(t.nbytes for t in state["momentum"].values()) == 4 * num_values(blocks) / 4
        assert not state["variance"]


def test_singular_values_become_about_one() -> None:
    matrix = torch.randn(40, 90) @ torch.diag(torch.linspace(0.1, 5, 90))
    values = torch.linalg.svdvals(orthogonalised(matrix, 5, torch.float32))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_no_rank_has_more_than_its_part_and_the_last_item() -> None:
    costs = {f"w{i}": float(i % 7 + 1) for i in range(40)}
    for size in (1, 2, 3, 8):
        loads = [0.0] * size
        for name, rank in balanced(costs, size).items():
            loads[rank] += costs[name]
        assert max(loads) - min(loads) <= 7


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


@pytest.mark.parametrize(
    ("size", "fraction"), [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.25), (3, 1.0)]
)
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
