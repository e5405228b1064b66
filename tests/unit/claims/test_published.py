"""Terms learned from published scaling: the fit, what is kept of it, and predictions from it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtrit

from lab.claims.claims import Paper
from lab.claims.findings import verify
from lab.claims.predicted import Predicted, hardware_of, preset_of
from lab.claims.published import (
    FigureScore,
    _of_lines,
    figures,
    fitted,
    held_out,
    left_out,
    unseen,
)
from lab.settings.files import read_file
from lab.simulate.hardware import parse
from lab.simulate.predict import predicted, read
from lab.simulate.terms import FREEDOM, LEVELS, TERMS, learned, published, reach

PAGE = Path(__file__).parents[3] / "docs/results/published.md"
TRUE = np.log([0.05, 2.0, 0.012, 0.06, 1.1])


def test_a_fit_finds_the_terms_that_made_its_figures() -> None:
    chance = np.random.default_rng(0)
    slopes = chance.uniform(0, 0.2, (60, len(TERMS)))
    member = np.repeat(np.eye(4), 15, axis=0)
    found = _of_lines(slopes @ TRUE + 0.002 * chance.standard_t(4, 60), slopes, member)
    spread = np.sqrt(found.of_a_new_source.diagonal())
    assert np.abs(found.logarithms - TRUE).max() < 3 * spread.max()
    assert np.abs(found.logarithms - TRUE).mean() < 0.1
    assert found.residual == pytest.approx(0.002, rel=0.5)


@pytest.mark.parametrize("level", [0.01, *LEVELS, 0.999])
def test_intervals_reach_as_far_as_a_t_distribution(level: float) -> None:
    far = 0.3 * stdtrit(FREEDOM, (1 + level) / 2)
    assert np.log(reach(1.0, 0.3, level)) == pytest.approx([-far, far])


def test_no_fit_has_the_figures_of_the_examination() -> None:
    exam = unseen()
    assert {each.origin for each in exam}.isdisjoint(each.origin for each in figures())
    assert f"We found {len(exam)} more figures" in PAGE.read_text()


def test_an_outlier_bends_little() -> None:
    chance = np.random.default_rng(1)
    slopes, member = chance.uniform(0, 0.2, (60, len(TERMS))), np.ones((60, 1))
    aim = slopes @ TRUE + 0.002 * chance.standard_t(4, 60)
    clean = _of_lines(aim, slopes, member).logarithms
    aim[0] += 0.5
    assert np.abs(_of_lines(aim, slopes, member).logarithms - clean).max() < 0.05


def test_figures_of_other_devices_start_at_what_was_published() -> None:
    known = {figure.says: figure for figure in figures()}
    ddp = known["ResNet-50, batch 32: 16 GPUs"]
    assert math.exp(ddp.slowdown) == pytest.approx(104 / 97) and ddp.linear == 0
    assert ddp.speedup(ddp.slowdown) == pytest.approx(16 * 97 / 104)
    strong = known["Eight nodes train 294800 images/s, 5.26 times as many as one node"]
    assert strong.speedup(strong.linear) == pytest.approx(8)
    assert strong.speedup(strong.slowdown) == pytest.approx(5.259)
    assert len({figure.origin for figure in known.values()}) == 14


def test_predictions_start_from_the_terms_and_have_both_intervals() -> None:
    words = (
        "profile=resnet50_v100_fp32 hardware=v100_x8 strategy=overlap scaling=weak batch_size=32"
    )
    result, _ = predicted(read([*words.split(), "world_size=1,8"]))
    alone, row = result["rows"]
    assert alone["speedup"] == 1 and "speedup_interval_80" not in alone
    (narrow, wide) = row["speedup_interval_80"], row["speedup_interval"]
    assert wide[0] < narrow[0] < row["speedup"] < narrow[1] < wide[1]
    # The point is the median: as far from either end, in factors.
    assert row["speedup"] ** 2 == pytest.approx(wide[0] * wide[1])
    given, _ = predicted(read([*words.split(), "world_size=8", "hardware.engage=0"]))
    assert given["rows"][0]["speedup"] > row["speedup"]


def test_terms_are_of_gpus_and_of_presets_that_take_them() -> None:
    for name, takes in (("v100_x8", True), ("titanx_x4", False), ("emulated_1gbit", False)):
        hardware = learned(parse(read_file("hardware", name)))
        assert (hardware.learned is not None) == (hardware.engage > 0) == takes


def test_claims_are_predicted_by_terms_that_know_nothing_of_their_source() -> None:
    for name in read_file("published", "scaling")["claims"]:
        paper = Paper.parse(read_file("claims", name))
        assert paper.origin in {figure.origin for figure in figures()}
        assert published(paper.origin) != published() == published("another source")
    paper = Paper.parse(read_file("claims", "tf_benchmarks"))
    assert paper.hardware
    own = hardware_of(paper.hardware, paper.origin)
    assert own.learned == published(paper.origin).without(())
    assert own.jitter != hardware_of(paper.hardware).jitter != preset_of(paper.hardware).jitter
    verdicts = verify("tf_benchmarks").verdicts
    alone = Predicted(paper.profile or "", own)
    assert [each.predicted for each in verdicts] == [each.claim.value(alone) for each in verdicts]


@pytest.mark.slow
def test_the_page_and_the_terms_are_those_of_today() -> None:
    given = figures()
    fit = fitted(given)
    assert fit.prior.means == pytest.approx(published().means, abs=0.02)
    fits = left_out(given, fit.logarithms)
    for origin, each in fits.items():
        assert each.prior.means == pytest.approx(published(origin).means, abs=0.02), origin
    rows = held_out(given, fits)
    score = FigureScore.of(rows)
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith("| **all**"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    inside = [sum(row.covered(level) for row in rows) / len(rows) for level in LEVELS]
    assert cells[1:3] == [str(len(rows)), f"{100 * score.median:.1f} %"]
    assert cells[6:] == [f"{score.skill:.2f}", *(f"{100 * share:.0f} %" for share in inside)]
