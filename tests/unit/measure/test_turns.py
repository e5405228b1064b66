"""Turns: which steps count, and a step's seconds in each turn."""

from __future__ import annotations

import numpy as np

from lab.measure.turns import Turns, order


def test_the_first_round_of_a_turn_and_steps_made_alone_do_not_count() -> None:
    counted = Turns(alone=2, size=3, every=1).counted(8)
    assert counted.tolist() == [False, False, False, True, True, False, True, True]
    by_rounds = Turns(alone=2, size=6, every=2).counted(8)
    assert by_rounds.tolist() == [False] * 4 + [True] * 4


def test_a_turn_lasts_as_long_as_the_median_round_of_the_slowest_rank() -> None:
    round_s = np.array([[1.0, 2.0, 9.0, 4.0], [3.0, 1.0, 2.0, 4.0]])
    assert Turns(alone=0, size=3, every=1).seconds(round_s) == [2.5, 6.5]


def test_orders_are_permutations_that_differ_between_rounds() -> None:
    orders = [order(5, number) for number in range(20)]
    assert all(sorted(each) == [0, 1, 2, 3, 4] for each in orders)
    assert len({each[0] for each in orders}) == 5
