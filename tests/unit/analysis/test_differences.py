"""Two studies of one thing are not told apart, and a real difference is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lab.analysis.differences import differences
from lab.analysis.records import load_study
from lab.analysis.speedup import Row, table
from tests.support.records import leave, make_record

POINTS, REPEATS, NOISE = 30, 6, 0.03


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Row:
    folder = tmp_path_factory.mktemp("study")
    leave(folder / "a", make_record("tree", 2, 0.1))
    return table(load_study(folder))[0]


def study(row: Row, rng: np.random.Generator, step_s: float = 0.1) -> list[Row]:
    return [
        replace(
            row,
            series=f"series {at}",
            num_repeats=REPEATS,
            steps_s=dict(enumerate(step_s * np.exp(rng.normal(0, NOISE, REPEATS)))),
        )
        for at in range(POINTS)
    ]


def test_of_200_pairs_of_equal_studies_at_most_a_twentieth_differ_anywhere(row: Row) -> None:
    rng = np.random.default_rng(0)
    false = 0
    for _ in range(200):
        found = differences(study(row, rng), study(row, rng), math.nan)
        assert len(found) == POINTS
        false += any(each.finding in ("faster", "slower") for each in found)
    assert false <= 10


def test_a_difference_is_found_unless_it_is_within_the_noise_floor(row: Row) -> None:
    rng = np.random.default_rng(0)
    first, second = study(row, rng), study(row, rng, 0.07)
    assert {each.finding for each in differences(first, second, 0.05)} == {"faster"}
    assert {each.finding for each in differences(second, first, 0.05)} == {"slower"}
    assert {each.finding for each in differences(first, second, 0.6)} == {"not distinguishable"}


def test_points_of_few_repeats_and_of_one_study_alone_are_no_verdict(row: Row) -> None:
    few = replace(row, num_repeats=2, steps_s={0: 0.1, 1: 0.1})
    (only,) = differences([few], [few, replace(few, series="other")], math.nan)
    assert only.finding == "too few repeats"
