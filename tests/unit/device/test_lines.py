"""Lines through times of several batches."""

from __future__ import annotations

import numpy as np
import pytest

from lab.device.profile import fixed_and_per_sample


def test_times_on_a_line_give_its_parts() -> None:
    batches = (64, 16, 32)
    times = [np.array([3.0 + 0.5 * batch, 0.25 * batch]) for batch in batches]
    fixed, per_sample = fixed_and_per_sample(batches, times)
    assert fixed == pytest.approx([3.0, 0.0], abs=1e-12)
    assert per_sample == pytest.approx([0.5, 0.25])


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
