"""The learning rate over time."""

from __future__ import annotations

from typing import Any

import pytest

from lab.settings.errors import ConfigError
from lab.training.optim import Schedule


def rates(steps: int = 104, **settings: Any) -> list[float]:
    schedule = Schedule(warmup_steps=4, **settings)
    return [schedule.rate(0.1, step, total_steps=104) for step in range(steps + 1)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"schedule": "constant"}, {"schedule": "linear"}, {"schedule": "step", "step_every": 30}],
)
def test_warm_up_is_linear_and_ends_at_the_peak(settings: dict[str, Any]) -> None:
    assert rates(**settings)[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


def test_cosine_ends_at_zero_by_way_of_half() -> None:
    assert [rates()[step] for step in (54, 104)] == pytest.approx([0.05, 0.0])


def test_linear_falls_by_the_same_in_each_step() -> None:
    fall = rates(schedule="linear")[4:]
    assert [a - b for a, b in zip(fall, fall[1:], strict=False)] == pytest.approx(100 * [0.001])
    assert fall[-1] == pytest.approx(0.0)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_final_share_is_the_rate_at_the_end(schedule: str) -> None:
    course = rates(schedule=schedule, final_share=0.2)
    assert course[4] == pytest.approx(0.1)
    assert course[54] == pytest.approx(0.06)  # half of the way from 0.1 to 0.02
    assert course[104] == pytest.approx(0.02)


def test_step_multiplies_every_so_many_steps_of_the_run() -> None:
    course = rates(schedule="step", step_every=30, step_factor=0.5)
    assert [course[step] for step in (29, 30, 59, 60, 100)] == [0.1, 0.05, 0.05, 0.025, 0.0125]


def test_constant_stays_and_linear_scaling_multiplies_the_peak() -> None:
    assert set(rates(schedule="constant")[4:]) == {0.1}
    assert Schedule(linear_scaling=True).peak(0.1, batch_size=512) == pytest.approx(0.4)
    assert Schedule().peak(0.1, batch_size=512) == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "poly"}, "schedule=poly: allowed are constant, cosine, linear, step"),
        ({"base_batch_size": 0}, "base_batch_size=0: must be an integer of at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1: must be an integer of at least 0"),
        ({"warmup_steps": True}, "warmup_steps=true: must be an integer"),
        ({"linear_scaling": 1}, "linear_scaling=1: must be true or false"),
        ({"final_share": 1.5}, "final_share=1.5: must be a number from 0 to 1"),
        ({"step_factor": float("nan")}, "step_factor=nan: must be a number from 0 to 1"),
        ({"schedule": "step"}, "step_every=null: must be an integer of at least 1"),
        ({"step_every": 30}, "step_every=30: needs optim.schedule=step"),
        (
            {"schedule": "constant", "final_share": 0.1},
            "final_share=0.1: needs optim.schedule=cosine or linear",
        ),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"optim.{message}"):
        Schedule(**settings)
