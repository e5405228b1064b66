"""Slow ranks, from synthetic own times whose delays are known."""

from __future__ import annotations

import numpy as np
import pytest

from lab.measure import OWN
from lab.measure.stragglers import MIN_STEPS, Slow, Times, stragglers
from tests.support.slow import some_of

NORMAL_S = (0.0001, 0.001, 0.02, 0.04, 0.003, 0.001)  # of OWN
STEP_S = 0.1


def work(
    ranks: int = 4, steps: int = 40, noise: float = 0.02, seed: int = 0, tail: bool = False
) -> Times:
    random = np.random.default_rng(seed)
    shape = ranks, steps, len(OWN)
    spread = random.exponential(noise, shape) if tail else noise * random.standard_normal(shape)
    return np.array(NORMAL_S) * (1 + spread)


def named(found: list[Slow]) -> list[tuple[int, str]]:
    return [(slow.rank, slow.phase) for slow in found]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("phase", OWN)
def test_a_delay_is_found_in_every_phase_and_measured(ranks: int, phase: str) -> None:
    for rank in range(ranks):
        times = work(ranks, seed=rank)
        times[rank, :, OWN.index(phase)] += 0.02
        found = stragglers(times, STEP_S)
        assert named(found) == [(rank, phase)]
        assert found[0].delay_s == pytest.approx(0.02, rel=0.1)
        assert found[0].share == 1


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("noise", some_of([0.02, 0.1, 0.3], also=[0.1]))
@pytest.mark.parametrize("tail", [False, True])
def test_clean_runs_accuse_nobody(ranks: int, noise: float, tail: bool) -> None:
    accused = [stragglers(work(ranks, 40, noise, seed, tail), STEP_S) for seed in range(100)]
    assert [each for each in accused if each] == []


def test_drift_that_all_ranks_share_is_no_delay() -> None:
    times = work() * (1 + np.linspace(0, 1, 40))[None, :, None]
    assert stragglers(times, STEP_S) == []
    times[1, :, 3] += 0.02
    assert named(stragglers(times, STEP_S)) == [(1, "backward")]


def test_a_load_that_passes_is_not_a_slow_rank() -> None:
    times = work()
    times[1, 10:20, 2:4] *= 2
    assert stragglers(times, STEP_S) == []


def test_two_of_four_ranks_may_be_slow() -> None:
    times = work()
    times[1, :, 3] += 0.02
    times[3, :, 3] += 0.03
    assert named(stragglers(times, STEP_S)) == [(3, "backward"), (1, "backward")]


def test_a_rank_slow_in_two_phases_has_the_longer_one_first() -> None:
    times = work()
    times[2, :, 2] += 0.02
    times[2, :, 3] += 0.04
    assert named(stragglers(times, STEP_S)) == [(2, "backward"), (2, "forward")]


def test_a_rank_that_only_waits_for_another_is_not_accused() -> None:
    """Rank 0 is late to update; rank 1 waits for it in its loop, between two steps."""
    times = work(2)
    times[0, :, OWN.index("update")] += 0.03
    times[1, :, OWN.index("between")] += 0.03
    assert stragglers(times, STEP_S) == []  # nothing tells work from wait here


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_delay_in_one_step_of_ten_is_named_as_such(ranks: int) -> None:
    times = work(ranks, 200)
    times[1, ::10, 3] += 0.05
    (slow,) = stragglers(times, STEP_S)
    assert (slow.rank, slow.phase, slow.share) == (1, "backward", 0.1)
    assert slow.delay_s == pytest.approx(0.05, rel=0.1)
    assert slow.mean_s == pytest.approx(0.005, rel=0.1)


def test_stalls_that_hit_any_rank_accuse_none() -> None:
    random = np.random.default_rng(1)
    times = work(4, 200)
    for step in range(0, 200, 5):
        times[random.integers(4), step, 3] += 0.05
    assert stragglers(times, STEP_S) == []


def test_phases_that_are_unknown_or_unlike_are_not_judged() -> None:
    times = work()
    times[2, :, 3] += 0.02
    assert stragglers(times, STEP_S, ["input", "forward"]) == []
    times[:, :, 4] = np.nan  # a library exchanges
    assert named(stragglers(times, STEP_S)) == [(2, "backward")]
    times[0, :, 3] = np.nan
    assert stragglers(times, STEP_S) == []


def test_too_few_steps_or_ranks_tell_nothing() -> None:
    times = work(4, MIN_STEPS - 1, noise=0.0)
    times[2, :, 3] += 0.05
    assert stragglers(times, STEP_S) == []
    assert stragglers(work(1), STEP_S) == []
