"""Figures for a paper's column: exactly as wide, legible, complete, and nothing overlaps."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from lab.draw.page import PAPER
from lab.draw.paper import paper_canvas
from lab.draw.style import RC
from lab.plot import main
from tests.support.figures import keep_saved, legend
from tests.support.records import leave, make_record

BATCHES, STRATEGIES = (32, 64, 128), ("none", "allreduce", "fc1x1_onebit")
WIDTH_IN = 3.3


@dataclass(frozen=True)
class Drawn:
    """The figures of a study of three batches by the names of their files, and the printed text."""

    folder: Path
    figures: dict[str, Figure]
    printed: str


def draw(folder: Path, *settings: str) -> Drawn:
    """Write the study, and draw it for a paper's column."""
    for strategy in STRATEGIES:
        for ranks in (1, 2, 4):
            for batch in BATCHES:
                record = make_record(
                    strategy,
                    ranks,
                    (1 / ranks + 0.1 * (ranks - 1)) * batch / 64,
                    batch_size=batch,
                    payload_bytes_per_step=[4_000_000 * (ranks - 1)] * ranks,
                    num_parameters=1_000_000,
                    transform="FCToConv" if strategy.startswith("fc") else None,
                )
                leave(folder / f"{strategy}-{ranks}-{batch}", record)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        figures = keep_saved(patch)
        assert main([str(folder), "format=svg", f"width_in={WIDTH_IN}", *settings]) == 0
    names = ("speedup_bars", "scaling", "throughput", "step_time", "payload")
    assert set(figures) == {f"{name}.svg" for name in names}
    return Drawn(folder / "figures", figures, printed.getvalue())


@pytest.fixture(scope="module")
def titled(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return draw(tmp_path_factory.mktemp("titled") / "demo")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return draw(tmp_path_factory.mktemp("bare") / "demo", "title=false")


def boxes(figure: Figure) -> dict[str, Bbox]:
    """Return the place of everything that is written outside the axes, in pixels."""
    with matplotlib.rc_context(RC | PAPER):
        figure.draw_without_rendering()  # it was saved at another resolution
    found: list[tuple[str, Text]] = [(f"figure {text.get_text()}", text) for text in figure.texts]
    for number, panel in enumerate(figure.axes):
        found += [(f"{number} {t.get_text()}", t) for t in (panel.title, panel.xaxis.label)]
        low, high = panel.get_xlim()
        shown = panel.xaxis.get_tick_params()["labelbottom"]
        ticks = [t for t in panel.get_xticklabels() if shown and low <= t.get_position()[0] <= high]
        found += [(f"{number} x {t.get_text()}", t) for t in ticks]
    (box,) = figure.legends
    found += [(f"legend {text.get_text()}", text) for text in box.get_texts()]
    return {name: text.get_window_extent() for name, text in found if text.get_text()}


@pytest.mark.parametrize("kind", ["titled", "bare"])
def test_nothing_overlaps_and_the_width_is_exact(kind: str, request: pytest.FixtureRequest) -> None:
    drawn: Drawn = request.getfixturevalue(kind)
    for name, figure in drawn.figures.items():
        assert f'width="{72 * WIDTH_IN:g}pt"' in (drawn.folder / name).read_text()
        places, whole = boxes(figure), figure.bbox
        for one, other in combinations(places, 2):
            assert not _overlap(places[one], places[other]), (name, one, other)
        for text, place in places.items():
            assert place.x0 >= -1 and place.x1 <= whole.width + 1, (name, text)
            assert place.y0 >= -1 and place.y1 <= whole.height + 1, (name, text)


def test_every_batch_has_its_panel_and_every_series_its_name(titled: Drawn) -> None:
    figure = titled.figures["throughput.svg"]
    assert [panel.get_title() for panel in figure.axes] == [f"global batch {b}" for b in BATCHES]
    assert [panel.get_ylabel() for panel in figure.axes] == ["images/s, all ranks", ""] + [
        "images/s, all ranks"
    ]
    assert figure.axes[0].get_ylim() == figure.axes[2].get_ylim()
    assert set(legend(figure)) == {"none (ceiling)", "allreduce", "fc1x1_onebit (another model)"}
    panels = [panel for each in titled.figures.values() for panel in each.axes]
    assert (
        min(float(text.get_fontsize()) for panel in panels for text in panel.get_xticklabels()) >= 7
    )


def test_a_caption_replaces_title_and_footer(titled: Drawn, bare: Drawn) -> None:
    texts = [text.get_text() for figure in bare.figures.values() for text in figure.texts]
    assert set(texts) == {""}
    assert bare.printed.count("caption: ") == len(bare.figures)
    assert "caption: Throughput, strong scaling. study demo · model AlexNet" in bare.printed
    assert "caption" not in titled.printed


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (2, 1), (3, 1), (5, 2), (4, 2)])
def test_columns_that_do_not_fit_go_below(columns: int, rows: int) -> None:
    figure, axes = paper_canvas(rows, columns, WIDTH_IN, 3.0, sharex="col", sharey="row")
    assert [len(line) for line in axes] == [columns] * rows
    assert {id(panel) for line in axes for panel in line} == {id(panel) for panel in figure.axes}
    axes[0][0].set_ylim(0, 7)
    assert all(panel.get_ylim() == (0, 7) for panel in axes[0])
    if rows > 1:
        assert axes[1][0].get_ylim() != (0, 7)
    places = [panel.get_subplotspec() for panel in axes[0]]
    assert [place.colspan.start for place in places if place] == [c % 2 for c in range(columns)]


def _overlap(one: Bbox, other: Bbox) -> bool:
    shared = Bbox.intersection(one, other)
    return shared is not None and shared.width > 1 and shared.height > 1
