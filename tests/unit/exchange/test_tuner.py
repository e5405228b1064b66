"""Trials of whole steps: which are timed, how few suffice, and what wins."""

from __future__ import annotations

import random

import pytest

from lab.exchange.auto import NEAR, Tuner


def tuner_of(predicted: list[float], rounds: int, tolerance: float = 0.01) -> Tuner:
    return Tuner(predicted, predicted, rounds, tolerance)


def held(tuner: Tuner, steps: list[float], noise: float = 0.0, seed: int = 0) -> list[int]:
    """Run a tuner among configurations whose steps take `steps` s; return its visits."""
    chance, visits = random.Random(seed), []
    while tuner.winner is None:
        visits.append(tuner.current)
        own = steps[tuner.current]
        times = [own * (1 + chance.gauss(0, noise)) for _ in range(tuner.num_timed)]
        tuner.end_visit(times)
    return visits


def test_the_fastest_wins_whatever_was_predicted() -> None:
    tuner = tuner_of([1.0, 0.5, 0.2, 0.1], 3)
    held(tuner, [2.0, 1.0, 1.2, 1.5])
    assert tuner.winner == 1


def test_what_alone_outlasts_a_whole_step_of_another_is_not_tried() -> None:
    tuner = Tuner([9.0, 1.5, 0.1], [5.0, 1.2, 0.1], rounds=3, tolerance=0.01)
    visits = held(tuner, [10.0, 1.5, 1.0])
    assert visits == [2, 1] and tuner.winner == 2
    assert tuner.medians() == {1: 1.5, 2: 1.0}


def test_a_preferred_one_wins_unless_another_is_clearly_faster() -> None:
    for first, winner in ((1.009, 0), (1.02, 1)):
        tuner = tuner_of([0.3, 0.2], 2)
        held(tuner, [first, 1.0])
        assert tuner.winner == winner


def test_later_rounds_have_the_fastest_and_the_preferred_one_in_the_other_order() -> None:
    steps = [1.05, 1.04, 1.03, 1.02, 1.01, 1.005, 1.0, 1 + 2 * NEAR]
    tuner = tuner_of([0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], 3, 0.0)
    first, second, third = [7, 6, 5, 4, 3, 2, 1, 0], [0, 2, 3, 4, 5, 6], [6, 5, 4, 0]
    assert held(tuner, steps) == first + second + third


def test_the_first_visit_of_each_has_two_cold_steps() -> None:
    tuner = tuner_of([0.1, 0.2], 2)
    assert tuner.num_untimed == 2
    for steps in ([1.0, 1.0], [1.0, 1.0]):
        tuner.end_visit(steps)
    assert tuner.num_untimed == 1


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_noise_costs_little(noise: float) -> None:
    chance, behind, num_steps = random.Random(1), [], []
    for seed in range(200):
        steps = [chance.uniform(1.0, 1.5) for _ in range(11)]
        tuner = tuner_of([step / 2 for step in steps], 4)
        visits = held(tuner, steps, noise, seed)
        assert tuner.winner is not None
        behind.append(steps[tuner.winner] / min(steps) - 1)
        num_steps.append(len(visits))
    assert sum(each <= 0.03 for each in behind) >= 0.9 * len(behind)
    assert max(behind) < 0.08


def test_a_contest_that_is_stopped_takes_what_is_known() -> None:
    tuner = tuner_of([0.3, 0.1, 0.2], 3)
    tuner.stop()
    assert tuner.winner == 1  # by prediction
    tuner = tuner_of([0.3, 0.1, 0.2], 3)
    tuner.end_visit([1.0])
    tuner.end_visit([0.9])
    tuner.stop()
    assert tuner.winner == 2  # by whole steps


def test_one_stall_drops_nobody() -> None:
    tuner = tuner_of([0.1, 0.2], 2, 0.0)
    tuner.end_visit([1.0, 9.0])
    tuner.end_visit([1.05, 1.05])
    tuner.end_visit([1.05] * 3)
    tuner.end_visit([1.0] * 3)
    assert tuner.winner == 0
