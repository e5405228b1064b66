"""Figures of a paper: bars, marks, lines, ticks and legends."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex

from lab.claims import figures
from lab.claims.claims import Paper, Reproduction
from lab.claims.findings import Conditions, Reproduced
from lab.claims.speedups import RateSpeedups, SpeedupMap, cell_speedups
from lab.draw import style
from lab.draw.looks import BLACK, ORANGE
from tests.support.figures import bars, heights, legend, ticks, xs, ys
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


def test_bars_show_what_is_measured_predicted_and_published() -> None:
    figure = figures.speedup_bars(reproduced(), EMULATED, ["note"])
    tree, none = figure.axes
    assert (tree.get_title(), none.get_title()) == ("tree", "none (ceiling)")
    assert ticks(tree, "x") == ["128", "512"]
    # The table has no tree on one rank, and its measured steps are twice the predicted ones.
    assert heights(tree) == pytest.approx([math.nan, 200 / 380, 200 / 460] * 2, nan_ok=True)
    assert heights(none) == pytest.approx([1, 2, 4] * 2)
    assert all(bar.get_hatch() == style.HATCH for bar in bars(tree))
    dashes = [ys(line) for line in tree.lines if line.get_color() == BLACK]
    assert [200 / 230] * 2 in [pytest.approx(dash) for dash in dashes]
    ranges = [ys(line) for line in tree.lines if line.get_color() == ORANGE]
    assert ranges[2] == pytest.approx([200 / 115, 200 / 460])
    diamonds = [ys(line) for line in tree.lines if line.get_marker() == "D"]
    assert diamonds == [[0.9]]
    ranks = ["1 rank", "2 ranks", "4 ranks"]
    assert legend(figure) == [*ranks, "predicted", "all repeats", "emulated", "published"]
    assert figure.get_supxlabel() == "note"


def test_without_measurements_bars_are_predicted() -> None:
    figure = figures.speedup_bars(reproduced(measured=False), None, [])
    assert heights(figure.axes[0])[1:3] == pytest.approx([200 / 190, 200 / 230])
    assert legend(figure) == ["1 rank", "2 ranks", "4 ranks", "published"]
    assert figure.get_suptitle() == "Speedup: predicted (bars) and published"


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_any_number_of_world_sizes_has_bars_of_its_own_colour_side_by_side(count: int) -> None:
    grid = replace(GRID, world_sizes=tuple(2**power for power in range(count)))
    figure = figures.speedup_bars(reproduced(grid), EMULATED, [])
    drawn = bars(figure.axes[1])
    assert len(drawn) == 2 * count
    assert len({to_hex(bar.get_facecolor()) for bar in drawn}) == count
    ordered = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in drawn)
    assert all(left[1] < right[0] for left, right in zip(ordered, ordered[1:], strict=False))


def test_the_map_shows_each_strategy_and_where_speedup_is_one() -> None:
    values = {"tree": ((0.5, 0.25), (2.0, 4.0)), "ring": ((2.0, 2.0), (0.5, math.nan))}
    figure = figures.regime_map(SpeedupMap("b", (2, 4), (64, 128), values), [])
    tree, ring, bar = figure.axes
    assert (tree.get_title(), ring.get_title()) == ("tree", "ring")
    assert mesh_of(tree) == [-1.0, -2.0, 1.0, 2.0]  # log2 of the speedup
    assert (ticks(tree, "x"), ticks(tree, "y")) == (["2"], ["64"])
    assert ticks(bar, "y")[3:6] == ["1/4", "1", "4"]
    assert legend(figure) == ["speedup = 1"]


def test_speedup_over_rate_has_a_line_for_each_strategy_and_marks_the_links() -> None:
    figure = figures.speedup_over_rate(RATES, [])
    first, second = figure.axes
    assert [panel.get_title() for panel in figure.axes] == ["global batch 128", "global batch 512"]
    assert xs(first.lines[0]) == pytest.approx([0.8, 8.0])  # Gb/s
    assert ys(second.lines[0]) == [1.0, 3.0]
    assert xs(first.lines[1]) == pytest.approx([1.0, 1.0])
    assert ticks(first, "x") == ["0.1", "1", "10", "100", "1000"]
    assert legend(figure) == ["tree", "the links it has"]


def mesh_of(panel: Axes) -> list[float]:
    (mesh,) = [each for each in panel.collections if isinstance(each, QuadMesh)]
    return [float(value) for value in np.ravel(np.asarray(mesh.get_array()))]
