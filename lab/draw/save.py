"""Save figures: the one place that calls matplotlib's savefig."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lab.draw.page import SCREEN, Page
from lab.draw.style import RC
from lab.settings.whole import write_atomically

DPI, PAPER_DPI = 150, 300
# Without a date in it, a file depends on its data alone.
METADATA: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def save(draw: Callable[[], Figure], *paths: Path, page: Page = SCREEN) -> Figure:
    """Call `draw` in the lab's style, write the figure to each of `paths`, and return it.

    Args:
        draw: is called here because matplotlib takes some of the style when artists are made, and
            some when they are rendered.
        paths: their suffixes say in which format.
        page: as given to the functions of lab.draw.style.

    Raises:
        OSError: a file cannot be written.
    """
    # What is cropped would no longer have the page's width.
    crop = "tight" if page.width_in is None else None
    dpi = DPI if page.width_in is None else PAPER_DPI
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # no matplotlibrc, which may lie in a stranger's folder
        matplotlib.rcParams.update(RC | page.style)
        figure = draw()
        for path in paths:
            kind = path.suffix.removeprefix(".")
            rest = {"dpi": dpi, "bbox_inches": crop, "metadata": METADATA.get(path.suffix)}
            write_atomically(path, partial(figure.savefig, format=kind, **rest))
    return figure
