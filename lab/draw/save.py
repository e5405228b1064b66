"""Save figures: the one place that calls matplotlib's savefig."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lab.draw.style import RC
from lab.settings.whole import write_atomically

DPI = 150
# Without a date in it, a file depends on its data alone.
METADATA: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def save(draw: Callable[[], Figure], *paths: Path) -> Figure:
    """Call `draw` in the lab's style, write the figure to each of `paths`, and return it.

    Args:
        draw: is called here because matplotlib takes some of the style when artists are made, and
            some when they are rendered.
        paths: their suffixes say in which format.

    Raises:
        OSError: a file cannot be written.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # no matplotlibrc, which may lie in a stranger's folder
        matplotlib.rcParams.update(RC)
        figure = draw()
        for path in paths:
            kind = path.suffix.removeprefix(".")
            rest = {"dpi": DPI, "bbox_inches": "tight", "metadata": METADATA.get(path.suffix)}
            write_atomically(path, partial(figure.savefig, format=kind, **rest))
    return figure
