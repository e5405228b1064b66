"""The gradient noise scale, from gradients whose noise is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.measure.statistics import noise_scale

DIMENSIONS, STEPS = 400, 300


def norms(spread: float, batch: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw squared norms of rank and mean gradients; the true gradient has norm 1."""
    chance = np.random.default_rng(0)
    true = np.full(DIMENSIONS, 1 / math.sqrt(DIMENSIONS))
    deviation = math.sqrt(spread / DIMENSIONS / batch)
    drawn = true + deviation * chance.standard_normal((STEPS, ranks, DIMENSIONS))
    small = (drawn**2).sum(axis=2).mean(axis=1)
    return small, (drawn.mean(axis=1) ** 2).sum(axis=1)


@pytest.mark.parametrize(("spread", "batch", "ranks"), [(50, 16, 2), (500, 64, 4), (5, 8, 8)])
def test_known_noise_is_found(spread: float, batch: int, ranks: int) -> None:
    found = noise_scale(*norms(spread, batch, ranks), (batch, batch * ranks))
    assert found.lo < spread < found.hi
    assert found.mid == pytest.approx(spread, rel=0.1)


def test_too_few_steps_or_noise_alone_say_nothing() -> None:
    small, big = norms(50, 16, 2)
    assert math.isnan(noise_scale(small[:2], big[:2], (16, 32)).mid)
    assert math.isnan(noise_scale(2 * big, big, (16, 32)).mid)
