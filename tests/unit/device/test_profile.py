"""Profiles from steps at several batches, whose times are made up, and the lines through them."""

from __future__ import annotations

import numpy as np
import pytest

from lab.device.profile import MeasuredSteps, fixed_and_per_sample, profile_of, scaled_to
from lab.model.profile import ALL, REST

ROUNDS = 12


def steps_at(batch: int, noise: np.ndarray) -> MeasuredSteps:
    """A step of two layers: 1 + b/10 and 2 ms forward, b/5 and 3 ms backward; 1 + b/50 around."""
    layers_ms = np.array([[1 + batch / 10, 2.0], [batch / 5, 3.0]]) * noise[:, None, None]
    pass_ms = layers_ms.sum(axis=(1, 2))
    return MeasuredSteps(batch, {"a": 5, "b": 7}, layers_ms, pass_ms, pass_ms + 1 + batch / 50)


def test_the_lines_are_found_again_at_the_largest_batch() -> None:
    noise = np.random.default_rng(0).normal(1.0, 0.01, (3, ROUNDS))
    found = [steps_at(batch, each) for batch, each in zip((80, 40, 20), noise, strict=True)]
    profile = profile_of(found, "mine", "made up", 1)
    a, b = profile.layers
    assert (profile.reference_batch, a.parameters, b.parameters) == (80, 5, 7)
    assert (a.forward_ms, a.backward_ms) == pytest.approx((9.0, 16.0), rel=0.02)
    assert (b.fixed_forward_ms, b.fixed_backward_ms) == pytest.approx((2.0, 3.0), rel=0.05)
    assert (profile.rest_ms, profile.fixed_rest_ms) == pytest.approx((2.6, 1.0), rel=1e-6)
    fits = {(fit.layer, fit.way): fit for fit in profile.fits}
    for true, fit in ((1.0, fits["a", "forward"]), (6.0, fits[ALL, "forward and backward"])):
        low, high = fit.fixed_ms["low"], fit.fixed_ms["high"]
        assert low is not None and high is not None and low < true < high
    assert fits[REST, "step"].per_sample_ms["median"] == pytest.approx(1 / 50)
    # Between the batches that were measured: 50 samples.
    assert 1000 * profile.compute_s(50) == pytest.approx(6 + 15, rel=0.02)


def test_what_is_fixed_of_all_layers_is_the_sum_of_their_parts() -> None:
    """One layer's line begins at -2 ms, which counts as 0: that of the sum begins at 4, not 6."""
    noise = np.random.default_rng(0).normal(1.0, 0.01, (2, ROUNDS))
    found = list[MeasuredSteps]()
    for batch, each in zip((80, 40), noise, strict=True):
        layers_ms = np.array([[batch / 10 - 2, 2.0], [batch / 5, 4.0]]) * each[:, None, None]
        pass_ms = layers_ms.sum(axis=(1, 2))
        found.append(MeasuredSteps(batch, {"a": 5, "b": 7}, layers_ms, pass_ms, pass_ms))
    profile = profile_of(found, "mine", "made up", 1)
    fixed_ms = sum(each.fixed_forward_ms + each.fixed_backward_ms for each in profile.layers)
    assert fixed_ms == pytest.approx(6.0, rel=0.1)
    (whole,) = (fit for fit in profile.fits if fit.layer == ALL)
    assert whole.fixed_ms["median"] == pytest.approx(fixed_ms)
    low, high = profile.drawn(0.0).compute_s(20), profile.drawn(1.0).compute_s(20)
    assert low < profile.compute_s(20) < high


def test_few_rounds_have_no_intervals() -> None:
    found = [steps_at(batch, np.ones(2)) for batch in (8, 2)]
    profile = profile_of(found, "mine", "made up", None)
    assert all(fit.fixed_ms["low"] is None is fit.per_sample_ms["high"] for fit in profile.fits)
    assert profile.drawn(0.0) is profile


def test_layers_are_scaled_to_a_pass_without_clocks() -> None:
    times = np.array([[[4.0, 1.0], [2.0, 1.0]]])  # one round of two layers
    assert scaled_to(12.0, times).tolist() == [[[6.0, 1.5], [3.0, 1.5]]]


def test_an_error_weighs_by_its_share_of_the_time() -> None:
    """Both points are 10 % too long; in absolute terms the larger would decide the line."""
    batches, times = (1, 100, 1000), [1.1, 100.0, 1100.0]
    _, per_sample = fixed_and_per_sample(batches, list(map(np.array, times)))
    relative = per_sample * np.array(batches) / times
    assert per_sample == pytest.approx(1.05, abs=0.03)
    assert np.polyfit(batches, times, 1)[0] > 1.09
    assert np.abs(relative - 1).max() < 0.1


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((2.0, 4.0), (0.0, 2.0)),
        ((3.0, 4.0), (2.0, 1.0)),
        ((1.0, 4.0), (0.0, 1.5 / 1.25)),  # a line would begin below 0: b/t over b²/t²
        ((4.0, 3.0), (84 / 25, 0.0)),  # it would fall: 1/t over 1/t²
        ((0.0, 0.0), (0.0, 0.0)),  # a layer that is never called
    ],
)
def test_through_two_batches_it_passes_exactly_and_no_part_is_below_0(
    times: tuple[float, float], expected: tuple[float, float]
) -> None:
    fixed, per_sample = fixed_and_per_sample((1, 2), [np.array(each) for each in times])
    assert (float(fixed), float(per_sample)) == pytest.approx(expected)
