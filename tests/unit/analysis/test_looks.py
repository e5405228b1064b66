"""Figures draw every strategy of conf/strategy in the style of lab/draw/looks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes

from lab.analysis.figures.speedup import scaling
from lab.analysis.records import load_study
from lab.analysis.sheet import Sheet
from lab.analysis.speedup import table
from lab.draw.looks import LOOKS, looks_of
from tests.support.cases import ALL_STRATEGIES
from tests.support.slow import some_of
from tests.unit.analysis.test_plot import write_run


@pytest.mark.parametrize("strategy", some_of(ALL_STRATEGIES, every=5))
def test_figures_draw_a_strategy_as_its_look_says(strategy: str, tmp_path: Path) -> None:
    for name in {"none", strategy}:
        for num_ranks in (1, 2, 4):
            write_run(tmp_path, name, num_ranks)
    study = load_study(tmp_path)
    rows = table(study, None)
    figure = scaling(Sheet(study, "strong", tuple(rows), looks_of(row.series for row in rows)))
    (legend,) = figure.legends
    assert any(text.get_text().split(" ")[0] == strategy for text in legend.get_texts())
    look = LOOKS[strategy]
    assert (look.colour, look.line) in lines_of(figure.axes)


def lines_of(axes: list[Axes]) -> set[tuple[object, object]]:
    """List colours and styles of all drawn lines."""
    return {(line.get_color(), line.get_linestyle()) for panel in axes for line in panel.lines}
