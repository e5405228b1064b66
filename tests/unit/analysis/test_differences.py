"""Two studies of one thing are not told apart, and a real difference is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from lab.analysis.points import Point, differences, table
from lab.analysis.records import load_study
from tests.support.records import leave, make_record

POINTS, REPEATS, NOISE = 30, 6, 0.03


@pytest.fixture(scope="module")
def point(tmp_path_factory: pytest.TempPathFactory) -> Point:
    folder = tmp_path_factory.mktemp("study")
    leave(folder / "a", make_record("tree", 2, 0.1))
    return table(load_study(folder))[0]


def measured(point: Point, series: str, steps_s: Iterable[float]) -> Point:
    cells = [
        replace(point.one, series=series, repeat=repeat, step_s=step_s)
        for repeat, step_s in enumerate(steps_s)
    ]
    return Point(tuple(cells))


def study(point: Point, rng: np.random.Generator, step_s: float = 0.1) -> list[Point]:
    return [
        measured(point, f"series {at}", step_s * np.exp(rng.normal(0, NOISE, REPEATS)))
        for at in range(POINTS)
    ]


def test_of_200_pairs_of_equal_studies_at_most_a_twentieth_differ_anywhere(point: Point) -> None:
    rng = np.random.default_rng(0)
    false = 0
    for _ in range(200):
        found = differences(study(point, rng), study(point, rng), math.nan)
        assert len(found) == POINTS
        false += any(each.finding in ("faster", "slower") for each in found)
    assert false <= 10


def test_a_difference_is_found_unless_it_is_within_the_noise_floor(point: Point) -> None:
    rng = np.random.default_rng(0)
    first, second = study(point, rng), study(point, rng, 0.07)
    assert {each.finding for each in differences(first, second, 0.05)} == {"faster"}
    assert {each.finding for each in differences(second, first, 0.05)} == {"slower"}
    assert {each.finding for each in differences(first, second, 0.6)} == {"not distinguishable"}


def test_points_of_few_repeats_and_of_one_study_alone_are_no_verdict(point: Point) -> None:
    few, other = (measured(point, series, (0.1, 0.1)) for series in ("one", "other"))
    (only,) = differences([few], [few, other], math.nan)
    assert only.finding == "too few repeats"
