"""Intervals hold their level, whatever the noise; equal strategies stay together."""

from __future__ import annotations

import math

import pytest

from lab.measure.intervals import of_difference, of_level, of_ratio, quantile
from tests.support.coverage import NOISES, REPEATS, coverage, false_leads
from tests.support.slow import some_of


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("noise", some_of(NOISES, every=3))
def test_the_interval_of_a_ratio_holds_95_percent(noise: str, repeats: int) -> None:
    assert 0.93 <= coverage(NOISES[noise], repeats, studies=4000) <= 0.97


@pytest.mark.parametrize("strategies", some_of([2, 6], every=2))
@pytest.mark.parametrize("noise", NOISES)
def test_equal_strategies_are_told_apart_in_at_most_5_percent(noise: str, strategies: int) -> None:
    assert false_leads(NOISES[noise], 3, 1000, strategies) <= 0.05


def test_values_by_hand() -> None:
    # Logarithms -1, 0 and 1: standard error 1 / sqrt(3), and 4.302653 of them (2 degrees, 95 %).
    half = 4.302653 / math.sqrt(3)
    found = of_ratio([1.0, math.e, math.e**2], [math.e] * 3)
    assert [found.lo, found.mid, found.hi] == pytest.approx([math.exp(-half), 1, math.exp(half)])
    found = of_difference([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    assert [found.lo, found.mid, found.hi] == pytest.approx([2 - half, 2, 2 + half])
    assert of_level([2.0, 8.0]).mid == pytest.approx(4)
    assert quantile(9) == pytest.approx(2.262157)


def test_too_few_values_have_no_ends() -> None:
    for values in ([1.0], [1.0, 2.0]):
        found = of_level(values)
        assert math.isnan(found.lo) and math.isnan(found.hi) and not math.isnan(found.mid)
    assert math.isnan(of_level([]).mid)
