"""Charts of a paper: their messages, their data, and texts that do not lie on each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lab.claims import figures
from lab.claims.claims import Paper, Reproduction
from lab.claims.findings import Reproduced
from lab.claims.metrics import Conditions
from lab.claims.predicted import RateSpeedups, SpeedupMap, cell_speedups
from lab.draw.chart import Chart, drawn
from tests.support.svg import outside, overlapping
from tests.unit.claims.facts import Table

GRID = Reproduction("s", "h", 1.0, ("tree", "none"), (1, 2, 4), (128, 512))
CLAIM = {"says": "s", "kind": "own", "source": "1", "quantity": "speedup", "check": {"at_most": 1}}
CLAIM |= {"at": {"strategy": "tree", "world_size": 4, "batch_size": 128}, "published": 0.9}
PAPER = Paper.parse({"title": "t", "profile": "p", "hardware": "h", "claims": [CLAIM]})
RATES = RateSpeedups(
    "b", 4, (1e8, 1e9), 1.25e8, {128: {"tree": (0.5, 2.0)}, 512: {"tree": (1.0, 3.0)}}
)
EMULATED = Conditions(("one",), ("hosts",), ("0123456",))


def reproduced(grid: Reproduction = GRID, measured: bool = True) -> Reproduced:
    cells = cell_speedups(PAPER, grid, Table(), Table(tree=2.0) if measured else None)
    return Reproduced(grid, "b", cells, None, (), RATES, SpeedupMap("b", (), (), {}))


def rows_of(chart: Chart) -> list[dict[str, Any]]:
    """Return the chart's data, once its texts were found to have places of their own."""
    svg = drawn(chart.spec(), "svg").decode()
    assert overlapping(svg) == outside(svg) == []
    return max(chart.spec()["datasets"].values(), key=len)


def test_bars_show_what_is_measured_predicted_and_published() -> None:
    chart = figures.speedup_bars(reproduced(), EMULATED, ["note"])
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


def test_without_measurements_bars_are_predicted() -> None:
    chart = figures.speedup_bars(reproduced(measured=False), None, [])
    assert chart.message.startswith("Speedup predicted on 4 ranks: 0.87 (tree")
    assert [row["value"] for row in rows_of(chart)][1] == pytest.approx(200 / 190)


@pytest.mark.parametrize("count", [1, 5, 9])
def test_any_number_of_world_sizes_has_a_colour_for_each(count: int) -> None:
    grid = replace(GRID, world_sizes=tuple(2**power for power in range(count)))
    spec = str(figures.speedup_bars(reproduced(grid), EMULATED, []).spec())
    assert len(set(figures.shades(count))) == count and str(figures.shades(count)) in spec


def test_the_map_shows_each_strategy_and_where_speedup_is_one() -> None:
    values = {"tree": ((0.5, 0.25), (2.0, 4.0)), "ring": ((2.0, 2.0), (0.5, math.nan))}
    chart = figures.regime_map(SpeedupMap("b", (2, 4), (64, 128), values), [])
    rows = rows_of(chart)
    assert [row["log2"] for row in rows if row["strategy"] == "tree"][:4] == [-1, -2, 1, 2]
    even = [(row["ranks"], row["even"]) for row in rows if row["even"]]
    assert even == [(2, pytest.approx(64 * 2**0.5)), (4, pytest.approx(64 * 2**0.5))]
    assert chart.message == "On 4 ranks training is predicted to pay from batch 64 on, with ring"


def test_speedup_over_rate_says_what_is_best_at_the_links() -> None:
    chart = figures.speedup_over_rate(RATES, [])
    assert {row["x"] for row in rows_of(chart) if row["value"]} == {0.8, 8.0}  # Gb/s
    assert chart.message == (
        "Predicted: at the links it has, 1 Gb/s, tree gains most, 1.00 × on 4 ranks"
    )
