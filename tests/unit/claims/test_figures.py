"""Figures of findings, fitted terms, and claims that a wrong exchange would fail."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from lab.claims import figures
from lab.claims.claims import Claim, Paper, Reproduction
from lab.claims.findings import Reproduced
from lab.claims.metrics import delivered_error
from lab.claims.predicted import Predicted, cell_speedups
from lab.draw.chart import Chart, drawn
from lab.settings.files import read_file
from lab.simulate.hardware import parse
from lab.simulate.score import ScoredCell
from tests.conftest import ROOT
from tests.support import mutants
from tests.support.mutants import INTACT, MUTANTS, Mutant
from tests.support.svg import outside, overlapping
from tests.unit.claims.facts import Table

GRID = Reproduction("s", "h", 1.0, ("tree", "none"), (1, 2, 4), (128, 512))
CLAIM = {"says": "s", "source": "1", "quantity": "speedup", "check": {"at_most": 1}}
CLAIM |= {"at": {"strategy": "tree", "world_size": 4, "batch_size": 128}, "published": 0.9}
PAPER = Paper.parse({"title": "t", "profile": "p", "hardware": "h", "claims": [CLAIM]})
PREDICTED = Predicted("alexnet_titanx", parse(read_file("hardware", "titanx_x4")))


def reproduced(grid: Reproduction = GRID, measured: bool = True) -> Reproduced:
    cells = cell_speedups(PAPER, grid, Table(), Table(tree=2.0) if measured else None)
    return Reproduced(grid, PREDICTED, PREDICTED, cells, None)


def rows_of(chart: Chart) -> list[dict[str, Any]]:
    """Return the chart's data, once its texts were found to have places of their own."""
    svg = drawn(chart.spec(), "svg").decode()
    assert overlapping(svg) == outside(svg) == []
    return max(chart.spec()["datasets"].values(), key=len)


def test_bars_show_what_is_measured_predicted_and_published() -> None:
    chart = figures.speedup_bars(reproduced(), ["note"])
    tree = [row for row in rows_of(chart) if row["strategy"] == "tree"]
    # The table has no tree on one rank, and its measured steps are twice the predicted ones.
    assert [row["value"] for row in tree] == [
        None,
        *map(pytest.approx, (200 / 380, 200 / 460)),
    ] * 2 + [None]
    assert tree[2]["predicted"] == pytest.approx(200 / 230) and tree[6]["published"] == 0.9
    assert (tree[2]["low"], tree[2]["high"]) == pytest.approx((200 / 460, 200 / 115))
    assert chart.message == (
        "Speedup measured on 4 ranks: 0.43 (tree, batch 128) to 0.43 (tree, batch 128)"
    )
    assert chart.about[-1] == "note"


def scored(strategy: str, ranks: int, batch: int, *seconds: float) -> ScoredCell:
    return ScoredCell(strategy, "p", ranks, batch, seconds, 1.0, (1.0, 1.0), "held out", False, "")


def test_the_finding_is_a_panel_of_measured_cures_and_published_figures() -> None:
    cures = ({"name": "tree", "strategy": "tree"}, {"name": "cure", "strategy": "ring"})
    found = reproduced(replace(GRID, setup="emulated", cures=cures))
    cells = [scored(name, 1, batch, 1.0) for name in ("tree", "ring") for batch in (128, 512)]
    cells += [scored("tree", 4, 128, 2.0, 2.0, 2.5), scored("tree", 4, 512, 0.8)]
    cells += [scored("ring", 4, 128, 0.5), scored("ring", 4, 512, 0.25)]
    chart = figures.finding(cells, found, "We, A paper")
    assert chart and chart.message == (
        "With a tree, 4 workers are at most 1.2 times as fast as one, and slower at small batches; "
        "remedies reach 4.0 to 4.0 times at 512 images"
    )
    rows = rows_of(chart)
    assert [rows[0][key] for key in ("low", "value", "high")] == [0.4, 0.5, 0.5]
    assert [row["value"] for row in rows if row["series"] == "We: 0.9"] == [0.9, None]
    assert figures.finding(cells[:4], found, "nothing on four ranks") is None


def test_without_measurements_bars_are_predicted() -> None:
    chart = figures.speedup_bars(reproduced(measured=False), [])
    assert chart.message.startswith("Speedup predicted on 4 ranks: 0.87 (tree")
    assert [row["value"] for row in rows_of(chart)][1] == pytest.approx(200 / 190)


def test_the_map_shows_each_strategy_and_where_speedup_is_one() -> None:
    columns = ["strategy", "batch", "ranks", "speedup"]
    tree = [("tree", 64, 2, 0.5), ("tree", 64, 4, 0.25), ("tree", 128, 2, 2.0), ("tree", 128, 4, 4)]
    ring = [("ring", 64, 2, 2.0), ("ring", 64, 4, 2.0), ("ring", 128, 2, 0.5)]
    missing = ("ring", 128, 4, math.nan)
    chart = figures.regime_map(pd.DataFrame([*tree, *ring, missing], columns=columns), [])
    rows = rows_of(chart)
    assert [row["log2"] for row in rows if row["strategy"] == "tree"][:4] == [-1, -2, 1, 2]
    even = [(row["ranks"], row["even"]) for row in rows if row["even"]]
    assert even == [(2, pytest.approx(64 * 2**0.5)), (4, pytest.approx(64 * 2**0.5))]
    assert chart.message == (
        "Predicted: 4 ranks are faster than one from global batch 64 on, first with ring"
    )


def test_speedup_over_rate_says_what_is_best_at_the_links() -> None:
    chart = figures.speedup_over_rate(reproduced(), [])
    rows = [row for row in rows_of(chart) if row["value"]]
    assert [min(row["x"] for row in rows), max(row["x"] for row in rows)] == pytest.approx(
        [0.08, 8 * 10**2.5]
    )  # Gb/s
    best = max(row["value"] for row in rows if row["series"] == "tree" and row["x"] < 100)
    assert (
        re.fullmatch(
            "Predicted: over the machine's links of [0-9.]+ Gb/s, tree is fastest, "
            "with a speedup of [0-9.]+ on 4 ranks",
            chart.message,
        )
        and best < 4
    )


LINE: dict[str, Any] = {
    "says": "VGG-16, batch 64",
    "source": "a page",
    "strategy": "layerwise",
    "profile": "vgg16_p100",
    "per_rank_batch_size": 64,
    "samples_per_s": {1: 154, 2: 295, 8: 1081},
    "within": 0.1,
}
NODE: dict[str, Any] = {"title": "t", "profile": "vgg16_p100", "hardware": "dgx1_p100"}


def test_a_series_is_an_input_and_a_claim_for_each_further_point() -> None:
    one, two, eight = Paper.parse({**NODE, "series": [LINE]}).claims
    assert (one.role, one.published, one.at.world_size) == ("input", 154, 1)
    assert (two.role, two.at.batch_size, eight.at.batch_size) == ("statement", 128, 512)
    assert eight.published == pytest.approx(1081 / 154) and eight.check.within == 0.1
    assert eight.says == "VGG-16, batch 64: 8 GPUs, 1081 images/s (7.02 ×)"
    with pytest.raises(ValueError, match="t: 'within'"):
        Paper.parse({**NODE, "series": [{k: v for k, v in LINE.items() if k != "within"}]})


@pytest.fixture(scope="module")
def intact() -> dict[tuple[Claim, int], str]:
    return mutants.outcomes(INTACT)


def test_stored_cells_are_predicted_within_bounds() -> None:
    assert not mutants.leaves_bounds(mutants.held_out_scores(INTACT))


@pytest.mark.slow
def test_without_a_mutant_claims_notice_nothing(intact: dict[tuple[Claim, int], str]) -> None:
    assert mutants.noticed_by(INTACT, intact) == []
    assert not mutants.figures_notice(mutants.figure_errors(INTACT), mutants.figure_errors(INTACT))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_noticed(mutant: Mutant, intact: dict[tuple[Claim, int], str]) -> None:
    by_cells = mutants.leaves_bounds(mutants.held_out_scores(mutant))
    errors = mutants.figure_errors(INTACT)
    by_figures = mutants.figures_notice(mutants.figure_errors(mutant), errors)
    assert mutants.noticed_by(mutant, intact) or by_figures or by_cells


@pytest.mark.slow
def test_the_documented_table_is_todays() -> None:
    assert "\n".join(mutants.table()) in (ROOT / "docs/results/mutants.md").read_text()


@pytest.mark.parametrize(("strategy", "most"), [("allreduce", 1e-6), ("onebit", 0.2)])
def test_exchanges_deliver_in_the_long_run(strategy: str, most: float) -> None:
    assert delivered_error(strategy) <= most
