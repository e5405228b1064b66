"""Read the contents of figures, for tests of figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle


def keep_saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Return a dict that collects every saved figure by the name of its file."""
    figures: dict[str, Figure] = {}
    save = Figure.savefig

    def savefig(figure: Figure, path: Path, **options: Any) -> None:
        save(figure, path, **options)
        assert path.is_file()
        figures[path.stem.removeprefix(".")] = figure  # the path is one beside it, for a moment

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def legend(figure: Figure) -> list[str]:
    """List the legend's entries."""
    (box,) = figure.legends
    return [text.get_text() for text in box.get_texts()]


def ticks(panel: Axes, axis: str) -> list[str]:
    """List the labels of an axis, "x" or "y"."""
    labels = panel.get_xticklabels() if axis == "x" else panel.get_yticklabels()
    return [label.get_text() for label in labels]


def texts(panel: Axes) -> list[str]:
    """List the texts inside the axes."""
    return [text.get_text() for text in panel.texts]


def bars(panel: Axes) -> list[Rectangle]:
    """List all bars in the order in which they were drawn."""
    groups = [group for group in panel.containers if isinstance(group, BarContainer)]
    return [bar for group in groups for bar in group.patches]


def heights(panel: Axes) -> list[float]:
    """List the heights of all bars."""
    return [bar.get_height() for bar in bars(panel)]


def xs(line: Line2D) -> list[float]:
    """List the x values of a line."""
    return [float(x) for x in np.asarray(line.get_xdata())]


def ys(line: Line2D) -> list[float]:
    """List the y values of a line."""
    return [float(y) for y in np.asarray(line.get_ydata())]
