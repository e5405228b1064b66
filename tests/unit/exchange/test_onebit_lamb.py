"""1-bit LAMB beside 1-bit Adam: what its ratios are, before and after freezing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.exchange.onebit_adam import MEMORY, OneBitAdam, OneBitLamb
from tests.support.directions import Ledger, deliver, num_values

SHAPES = {"weight": (24, 50), "bias": (24,)}
NUM, FREEZE = num_values(SHAPES), 30
ADAM: dict[str, Any] = {"block_size": 64, "freeze_at": FREEZE}


def model(bias: float = 0.3) -> nn.Module:
    layer = nn.Linear(50, 24)
    nn.init.constant_(layer.bias, bias)
    return layer


def gradients(steps: int, size: int = 2) -> Tensor:
    return torch.randn(steps, size, NUM) + 0.5 * torch.randn(NUM)


def lamb(given: Tensor, weights: nn.Module, **settings: Any) -> list[Ledger]:
    return deliver(partial(OneBitLamb, **ADAM, **settings), SHAPES, given, weights=weights)


def ratios(given: Tensor, ledgers: list[Ledger]) -> tuple[Tensor, Tensor]:
    """Divide directions by 1-bit Adam's: ratios of weight and bias, float32 [steps]."""
    plain = deliver(partial(OneBitAdam, **ADAM, signs_of="gradient"), SHAPES, given)[0].directions
    quotient = ledgers[0].directions / plain
    each = quotient.split([24 * 50, 24], dim=1)
    for values in each:
        torch.testing.assert_close(values, values[:, :1].expand_as(values), rtol=1e-5, atol=0)
    return each[0][:, 0], each[1][:, 0]


def test_a_direction_is_as_long_as_its_weights_until_frozen() -> None:
    given, weights = gradients(FREEZE), model()
    ledgers = lamb(given, weights)
    for values, weight in zip(
        ledgers[0].directions.split([24 * 50, 24], dim=1), weights.parameters(), strict=True
    ):
        torch.testing.assert_close(values.norm(dim=1), weight.norm().detach().expand(FREEZE))


def test_ratios_stay_in_their_range_and_are_one_for_weights_of_zero() -> None:
    given, weights = gradients(3), model(bias=0.0)
    of_weight, of_bias = ratios(given, lamb(given, weights, ratio_range=(0.9, 1.1)))
    assert of_weight.tolist() == pytest.approx([0.9] * 3)
    assert of_bias.tolist() == pytest.approx([1.0] * 3)


def test_frozen_the_mean_ratio_stays_while_gradients_do() -> None:
    given, weights = gradients(FREEZE + 120), model()
    ledgers = lamb(given, weights)
    kept = ledgers[0].exchange.state_dict()
    for name, ratio in zip(SHAPES, ratios(given, ledgers), strict=True):
        exact, mean = ratio[:FREEZE], ratio[0]
        for each in exact:
            mean = mean.lerp(each, 0.1)
        assert kept["trust"][name] == pytest.approx(mean.item(), rel=1e-4)
        assert ratio[FREEZE : FREEZE + MEMORY].tolist() == pytest.approx([mean.item()] * MEMORY)
        assert ratio[FREEZE + MEMORY :].tolist() == pytest.approx([mean.item()] * 100, rel=0.35)


def test_frozen_the_factor_makes_up_for_gradients_that_shrink() -> None:
    given, weights = gradients(FREEZE + 200), model()
    given[FREEZE + 60 :] /= 3
    ledgers = lamb(given, weights)
    ratio, _ = ratios(given, ledgers)
    factor = ratio[-1] / ratio[FREEZE]
    assert factor == pytest.approx(3, rel=0.15)
    steps = ratio[FREEZE + 1 :] / ratio[FREEZE:-1]
    assert steps.max() <= 1.1 + 1e-4
    assert steps.min() >= 0.9 - 1e-4
    (choice,) = ledgers[0].exchange.choices()
    assert choice["factor"][1] >= factor.item() * 0.99
    assert choice["frozen_at"] == FREEZE


@pytest.mark.parametrize("stop", [FREEZE - 2, FREEZE + MEMORY + 5])
def test_another_number_of_ranks_keeps_ratios(stop: int) -> None:
    states = [ledger.exchange.state_dict() for ledger in lamb(gradients(stop), model())]
    new = OneBitLamb(**ADAM).redistribute(states, 2, 3)
    for kind in ("trust", "power", "power_at_first", "factor"):
        assert new[kind] == states[0][kind]
