"""Saving, colours and text tables."""

from __future__ import annotations

import ast
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from lab.draw import style
from lab.draw.save import save
from lab.draw.text import aligned, markdown

LAB = Path(__file__).resolve().parents[3] / "lab"


def savers(folder: Path) -> set[str]:
    """List the files under `folder` whose code calls a method savefig."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("savefig", "imsave", "print_figure")
    }


def test_one_file_saves_figures(tmp_path: Path) -> None:
    assert savers(LAB) == {"draw/save.py"}
    (tmp_path / "view.py").write_text("def write(figure):\n    figure.savefig('a.png')\n")
    assert savers(tmp_path) == {"view.py"}


def test_figures_are_made_and_saved_in_the_style_of_the_lab(tmp_path: Path) -> None:
    sizes = []

    def draw() -> Figure:
        sizes.append(matplotlib.rcParams["font.size"])
        figure, axes = style.canvas(1, 1, 2.0, 1.0)
        axes[0][0].bar([0], [1], hatch=style.HATCH)
        return figure

    before = matplotlib.rcParams["font.size"]
    first, second = ([tmp_path / f"{name}.{kind}" for kind in ("svg", "pdf")] for name in "ab")
    save(draw, *first)
    save(draw, *second)
    assert sizes == [style.RC["font.size"]] * 2 and matplotlib.rcParams["font.size"] == before
    for one, other in zip(first, second, strict=True):  # the same data give the same bytes
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("count", [1, 2, 4, 5, 12])
def test_shades_are_distinct_and_grow_darker(count: int) -> None:
    colours = style.shades(count)
    assert len(set(colours)) == count
    light = [sum(to_rgb(colour)) for colour in colours]
    assert light == sorted(light, reverse=True)


def test_tables_are_aligned_and_written_in_markdown() -> None:
    table = [["", "step"], ["ring", "1.5"], ["tree_double", "12.5"]]
    assert aligned(table) == ["             step", "ring          1.5", "tree_double  12.5"]
    assert markdown(["a", "b"], [["1", "2"]]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]
