"""Serial fraction and the Universal Scalability Law, from studies that obey them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lab.analysis import summary
from lab.analysis.points import Point, table
from lab.analysis.records import load_study
from lab.analysis.summary import Scalability, scalability, serial_fraction, universal_law
from lab.measure.statistics import student
from tests.support.records import leave, make_record

SIZES = (1, 2, 4, 8)


def law(size: int, sigma: float, kappa: float) -> float:
    return size / (1 + sigma * (size - 1) + kappa * size * (size - 1))


def rows_of(folder: Path, sigma: float, kappa: float, noise: float = 0.0) -> list[Point]:
    """Leave a study of one strategy, in three repeats, and return its rows."""
    for repeat in range(3):
        for size in SIZES:
            seconds = (1 + noise * repeat) / law(size, sigma + noise * repeat, kappa)
            record = make_record("tree", size, seconds, repeat=repeat)
            leave(folder / f"{size}-{repeat}", record)
    return table(load_study(folder))


def test_amdahls_law_has_one_serial_fraction(tmp_path: Path) -> None:
    (found,) = scalability(rows_of(tmp_path, 0.1, 0.0))
    assert [e.mid for e in found.serial_fraction.values()] == pytest.approx([0.1] * 3)
    assert (found.contention.mid, found.coherency.mid) == pytest.approx((0.1, 0.0))
    assert found.best_size == math.inf or found.best_size > 1e6


def test_coherency_raises_the_fraction_and_bounds_the_ranks(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 0.1, 0.02)
    (found,) = scalability(rows)
    assert (found.contention.mid, found.coherency.mid) == pytest.approx((0.1, 0.02))
    fractions = [e.mid for e in found.serial_fraction.values()]
    assert fractions == sorted(fractions) and fractions[0] < fractions[-1]
    assert found.best_size == pytest.approx(math.sqrt(0.9 / 0.02))
    assert "serial fraction e(N) (Karp-Flatt)" in summary.text(rows, load_study(tmp_path))


def test_intervals_are_over_repeats(tmp_path: Path) -> None:
    (found,) = scalability(rows_of(tmp_path, 0.1, 0.0, noise=0.01))
    assert found.contention.lo < 0.11 < found.contention.hi
    assert found.contention.hi - found.contention.lo == pytest.approx(2 * 4.302653 * 0.01 / 3**0.5)


def test_values_by_hand() -> None:
    assert serial_fraction(2.0, 4) == pytest.approx(1 / 3)
    # 2 / 1.25 - 1 = 0.1 + 2 * 0.25, and 4 / S - 1 = 3 * 0.1 + 12 * 0.25.
    assert universal_law({2: 1.25, 4: 4 / 4.3}) == pytest.approx((0.1, 0.25))
    assert universal_law({2: 2.5, 4: 5.0}) == pytest.approx((-1 / 3, 1 / 15))  # superlinear


def test_intervals_hold_the_law_of_which_repeats_are_noise() -> None:
    """Without coherency too, at the end of what the law allows: 10 repeats of N = 2 and 4."""
    rng, draws, sigma = np.random.default_rng(0), 400, 0.2
    held = useless = 0
    for _ in range(draws):
        noisy = np.exp(rng.normal(0, 0.03, (10, 2)))
        fits = [
            universal_law({2: law(2, sigma, 0.0) * a, 4: law(4, sigma, 0.0) * b}) for a, b in noisy
        ]
        one, other = (student(np.array(values)) for values in zip(*fits, strict=True))
        held += one.lo <= sigma <= one.hi
        found = Scalability("tree", 64, {}, one, other)
        useless += math.isfinite(found.best_size)
    assert held >= 0.92 * draws
    assert useless <= 0.05 * draws  # a number of ranks that there is none of


def test_one_number_of_ranks_determines_no_law(tmp_path: Path) -> None:
    for size in (1, 2):
        leave(tmp_path / str(size), make_record("tree", size, 1 / size))
    (found,) = scalability(table(load_study(tmp_path)))
    assert found.serial_fraction[2].mid == 0 and math.isnan(found.contention.mid)
