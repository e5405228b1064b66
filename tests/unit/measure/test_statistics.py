"""Warm-up, the gradient noise scale, turns of runs, and intervals over repeats."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.measure.statistics import (
    FIRST,
    InterleavedSteps,
    noise_scale,
    of_difference,
    of_level,
    of_ratio,
    order,
    quantile,
    warmup_of,
)
from tests.support.coverage import NOISES, REPEATS, coverage, false_leads, recorded
from tests.support.slow import some_of


def steps(slow: int, count: int = 200, seed: int = 0) -> np.ndarray:
    """Step times of two ranks, of which the first ones are slower, and fall; [2, count]."""
    rng = np.random.default_rng(seed)
    times = 0.01 * np.exp(0.05 * rng.standard_normal((2, count)))
    times[:, :slow] *= 1 + np.linspace(2.0, 0.3, slow)
    return times


@pytest.mark.parametrize("slow", [0, 5, 20, 60])
def test_it_cuts_what_is_slow_and_seldom_much_more(slow: int) -> None:
    cuts = [warmup_of(steps(slow, seed=seed), None).num_steps for seed in range(40)]
    assert min(cuts) >= max(slow, FIRST) and max(cuts) <= 105
    assert np.median(cuts) <= max(slow, FIRST) + 15


def test_a_stall_is_no_warm_up() -> None:
    cuts = []
    for seed in range(20):
        times = steps(0, seed=seed)
        times[1, 30] *= 20
        cuts.append(warmup_of(times, None).num_steps)
    assert np.median(cuts) <= 35  # the stall may be cut, but not more


def test_a_run_that_never_settles_says_so() -> None:
    times = steps(0) * np.linspace(3, 1, 200)
    found = warmup_of(times, None)
    assert found.num_steps == pytest.approx(105, abs=5)
    assert "may not be steady yet" in found.reason


def test_a_short_run_and_a_number_that_was_asked_for() -> None:
    assert warmup_of(steps(3, count=20), None).num_steps == FIRST
    assert warmup_of(steps(3, count=4), None).num_steps == FIRST
    found = warmup_of(steps(3), 2)
    assert (found.num_steps, found.reason) == (2, "warmup_steps=2")


def test_a_batch_holds_whole_rounds() -> None:
    rounds = np.tile([1.0, 1.0, 1.0, 5.0], 50)[None]  # an exchange in every fourth step
    found = warmup_of(rounds, None, every=4)
    assert found.num_steps % 4 == 0 and found.num_steps <= 16


def test_steps_in_which_an_exchange_tried_others_are_warm_up() -> None:
    assert warmup_of(steps(0), 10, trials=30).num_steps == 30
    assert warmup_of(steps(0), 40, trials=30).num_steps == 40
    assert warmup_of(steps(0), None, trials=52).num_steps >= 52
    found = warmup_of(steps(0, count=20), 10, trials=20)
    assert (found.num_steps, found.reason) == (20, "the exchange tried others in the first 20")


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


def test_the_first_round_of_a_turn_and_steps_made_alone_do_not_count() -> None:
    counted = InterleavedSteps(num_warmup=2, size=3, every=1).steady_mask(8)
    assert counted.tolist() == [False, False, False, True, True, False, True, True]
    by_rounds = InterleavedSteps(num_warmup=2, size=6, every=2).steady_mask(8)
    assert by_rounds.tolist() == [False] * 4 + [True] * 4


def test_a_turn_lasts_as_long_as_the_median_round_of_the_slowest_rank() -> None:
    round_s = np.array([[1.0, 2.0, 9.0, 4.0], [3.0, 1.0, 2.0, 4.0]])
    assert InterleavedSteps(num_warmup=0, size=3, every=1).seconds(round_s) == [2.5, 6.5]


def test_orders_are_permutations_that_differ_between_rounds() -> None:
    orders = [order(5, number) for number in range(20)]
    assert all(sorted(each) == [0, 1, 2, 3, 4] for each in orders)
    assert len({each[0] for each in orders}) == 5


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


def test_recorded_cells_are_counted_by_pairs_and_by_groups() -> None:
    one, same, slow = ({0: f, 1: 1.01 * f, 2: 0.99 * f} for f in (1.0, 1.0, 2.0))
    assert recorded([[one, same], [one, slow]]) == (
        "2 pairs of equal cells: 1 with one leader, 1 intervals hold 1; 1 of 2 groups leave one out"
    )
